"""A front of one process, and asyncio over it: answers, refusals, what is owed. Several: test_lost_process.py."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvjax.engine import (
    AsyncLLMEngine,
    AsyncProcessFront,
    FinishReason,
    GenerationResult,
    LLMEngine,
    ProcessFront,
    SamplingParams,
)
from kvjax.engine.front import async_llm_engine
from kvjax.errors import EngineClosedError
from tests.engine.engines import AMPLE_BLOCKS, NUM_GREEDY_TOKENS, assert_no_leak, make_engine
from tests.models.golden_models import goldens_of

GOLDENS = goldens_of("llama")
GREEDY = SamplingParams(max_tokens=NUM_GREEDY_TOKENS, temperature=0.0)


def new_engine() -> LLMEngine:
    return make_engine("llama", num_blocks=AMPLE_BLOCKS)


def test_submitted_prompts_are_answered(tmp_path: Path) -> None:
    told: list[str] = []
    front = ProcessFront(new_engine(), tmp_path, on_result=lambda result: told.append(result.request_id))
    thread = threading.Thread(target=front.serve)
    thread.start()
    goldens = goldens_of("llama")
    futures = [front.submit(golden.prompt, GREEDY)[0] for golden in goldens]
    for golden, future in zip(goldens, futures, strict=True):
        assert future.result(60).output_token_ids.tolist() == golden.greedy.tolist()
    samples = front.submit(goldens[0].prompt, SamplingParams(max_tokens=4, n=3), request_id="own")
    assert [one.result(60).request_id for one in samples] == ["own", "own.1", "own.2"]
    front.close()
    thread.join(60)
    assert not thread.is_alive()
    assert len(told) == len(goldens) + 3
    assert front.taken_up == ()
    assert ProcessFront(new_engine(), tmp_path).taken_up == ()


def test_refusals_are_the_callers(tmp_path: Path) -> None:
    front = ProcessFront(new_engine(), tmp_path)
    too_long = front.submit([5] * 300, GREEDY)[0]
    aborted = front.submit([1, 2], GREEDY, request_id="a")[0]
    with pytest.raises(ValueError, match="request id 'a' is in use"):
        front.submit([1], GREEDY, request_id="a")
    with pytest.raises(ValueError, match="expected no token_matcher"):
        front.submit([1], SamplingParams(token_matcher=lambda: None))  # type: ignore[arg-type,return-value]
    front.abort("a")
    front.abort("nobody")
    front.close()
    with pytest.raises(EngineClosedError, match="the front is closed"):
        front.submit([1], GREEDY)
    front.serve()
    assert aborted.result(0).finish_reason is FinishReason.ABORT
    with pytest.raises(ValueError, match="300"):
        too_long.result(0)
    assert ProcessFront(new_engine(), tmp_path).taken_up == ()


def test_an_engine_with_requests_is_refused(tmp_path: Path) -> None:
    engine = new_engine()
    engine.add_request([1, 2], GREEDY)
    with pytest.raises(ValueError, match="expected an engine without requests, got 1 unfinished"):
        ProcessFront(engine, tmp_path)


@pytest.mark.parametrize("num_answers", [0, 2, 5])
def test_a_front_goes_on_with_what_the_one_before_owes(num_answers: int, tmp_path: Path) -> None:
    """The first ends while it answers; that answer may come twice, and none is lost."""
    answers: dict[str, list[int]] = {}

    def take(result: GenerationResult) -> None:
        tokens = result.output_token_ids.tolist()
        assert answers.setdefault(result.request_id, tokens) == tokens
        if len(answers) == num_answers + 1:
            raise OSError("planted")

    first = ProcessFront(new_engine(), tmp_path, on_result=take)
    goldens = goldens_of("llama")
    futures = [first.submit(golden.prompt, GREEDY, request_id=str(i))[0] for i, golden in enumerate(goldens)]
    with pytest.raises(OSError, match="planted"):
        first.serve()
    left = [future for future in futures if future.exception(0) is not None]
    assert len(left) >= len(goldens) - num_answers
    assert all(str(future.exception(0)) == "planted" for future in left)
    num_answers = len(goldens) + 9
    second = ProcessFront(new_engine(), tmp_path, on_result=take)
    assert set(second.taken_up) | set(answers) == {str(i) for i in range(len(goldens))}
    second.close()
    second.serve()
    assert answers == {str(i): golden.greedy.tolist() for i, golden in enumerate(goldens)}


def test_what_was_refused_and_not_noted_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It would fail every start from then on."""
    first = ProcessFront(new_engine(), tmp_path)
    first.submit([5] * 300, GREEDY, request_id="long")
    first.submit([5], GREEDY, request_id="short")
    second = ProcessFront(new_engine(), tmp_path)
    assert second.taken_up == ("long", "short")
    assert "gives up request 'long'" in caplog.text
    assert ProcessFront(new_engine(), tmp_path).taken_up == ("short",)


def run_beside(folder: Path, test: Callable[[AsyncProcessFront, ProcessFront], Awaitable[None]]) -> None:
    """Serves a front for a test; nothing is left of it afterwards."""
    front = ProcessFront(new_engine(), folder)
    thread = threading.Thread(target=front.serve)
    thread.start()
    try:
        asyncio.run(asyncio.wait_for(test(AsyncProcessFront(front), front), 120))
    finally:
        front.close()
        thread.join(60)
    assert not thread.is_alive()
    assert_no_leak(front.engine)
    assert ProcessFront(new_engine(), folder).taken_up == ()


def test_readers_get_the_tokens_of_the_engine_as_they_come(tmp_path: Path) -> None:
    async def tokens_of(requests: AsyncProcessFront, i: int) -> list[list[int]]:
        return [[*one.token_ids] async for one in requests.generate(GOLDENS[i].prompt, GREEDY)]

    async def test(requests: AsyncProcessFront, front: ProcessFront) -> None:
        for golden, found in zip(
            GOLDENS, await asyncio.gather(*(tokens_of(requests, i) for i in range(len(GOLDENS)))), strict=True
        ):
            assert len(found) > 1
            assert [token for one in found for token in one] == golden.greedy.tolist()
        chance = SamplingParams(max_tokens=5, temperature=0.7, n=3, seed=4)
        results = await requests.complete(GOLDENS[0].prompt, chance, request_id="own")
        assert [result.request_id for result in results] == ["own", "own.1", "own.2"]
        (alone,) = await requests.complete(GOLDENS[0].prompt, SamplingParams(max_tokens=5, temperature=0.7, seed=5))
        assert results[1].output_token_ids.tolist() == alone.output_token_ids.tolist()

    run_beside(tmp_path, test)


def test_who_leaves_has_the_request_aborted_and_who_is_aborted_reads_an_end(tmp_path: Path) -> None:
    async def test(requests: AsyncProcessFront, front: ProcessFront) -> None:
        long = SamplingParams(max_tokens=70, temperature=0.0)
        generator = requests.generate(GOLDENS[0].prompt, long)
        await anext(generator)
        await generator.aclose()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(requests.complete([1, 2], long), 1e-4)
        generator = requests.generate(GOLDENS[1].prompt, long, request_id="a")
        await anext(generator)
        front.abort("a")
        *_, last = [one async for one in generator]
        assert last.result is not None
        assert last.result.finish_reason is FinishReason.ABORT

    run_beside(tmp_path, test)


def test_refusals_and_ends_reach_their_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(requests: AsyncProcessFront, front: ProcessFront) -> None:
        with pytest.raises(ValueError, match="300"):
            await requests.complete([5] * 300, GREEDY)
        front.close()
        with pytest.raises(EngineClosedError, match="the front is closed"):
            await requests.complete([5], GREEDY)

    run_beside(tmp_path, test)
    other = ProcessFront(new_engine(), tmp_path / "other")
    other._index = 1
    with pytest.raises(ValueError, match="expected the front of process 0"):
        AsyncProcessFront(other)


def test_as_many_requests_are_in_the_front_as_it_has_room_for(tmp_path: Path) -> None:
    """Others wait, the most urgent first; each that has ended, was refused or was left makes room."""
    params = SamplingParams(max_tokens=5, temperature=0.0)

    async def test(_: AsyncProcessFront, front: ProcessFront) -> None:
        requests = AsyncProcessFront(front, max_requests=2)
        ended: list[int] = []
        submit, most = front.submit, 0

        def watched(*args: Any, **named: Any) -> Any:
            nonlocal most
            new = submit(*args, **named)
            futures.extend(new)
            most = max(most, sum(not future.done() for future in futures))
            return new

        async def run(i: int) -> None:
            await requests.complete(GOLDENS[i % len(GOLDENS)].prompt, params, priority=-i)
            ended.append(i)

        futures: list[Any] = []
        front.submit = watched  # type: ignore[method-assign]
        await asyncio.gather(*(run(i) for i in range(8)))
        assert most <= 2
        assert sorted(ended) == list(range(8))
        assert ended.index(7) < ended.index(2)  # 0 and 1 came first, then the most urgent
        front.submit = submit  # type: ignore[method-assign]
        with pytest.raises(ValueError, match=r"expected at most 2 samples \(max_requests\), got 3"):
            await requests.complete([5], SamplingParams(max_tokens=2, n=3, temperature=0.5))
        for _ in range(3):
            with pytest.raises(ValueError, match="300"):
                await requests.complete([5] * 300, params)
            generator = requests.generate(GOLDENS[0].prompt, SamplingParams(max_tokens=70, temperature=0.0))
            await anext(generator)
            await generator.aclose()
        assert len(await requests.complete([5], SamplingParams(max_tokens=2, n=2, temperature=0.5))) == 2

    run_beside(tmp_path, test)
    with pytest.raises(ValueError, match="expected max_requests >= 1, got 0"):
        AsyncProcessFront(ProcessFront(new_engine(), tmp_path / "other"), max_requests=0)


def test_a_step_that_fails_ends_all_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    front = ProcessFront(new_engine(), tmp_path)

    def fail() -> None:
        raise OSError("planted")

    async def read() -> None:
        requests = AsyncProcessFront(front)
        readers = [asyncio.create_task(requests.complete(golden.prompt, GREEDY)) for golden in GOLDENS]
        monkeypatch.setattr(front.engine, "step", fail)
        await asyncio.sleep(0)  # all submit
        with pytest.raises(OSError, match="planted"):
            await asyncio.to_thread(front.serve)
        for reader in readers:
            with pytest.raises(OSError, match="planted"):
                await reader

    asyncio.run(read())
    assert len(ProcessFront(new_engine(), tmp_path).taken_up) == len(GOLDENS)


def test_an_engine_of_several_processes_is_refused_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_llm_engine, "spans_processes", lambda mesh: True)
    with pytest.raises(ValueError, match="expected an engine of one process, got one of several; use AsyncProcess"):
        AsyncLLMEngine(new_engine())

"""Requests of asyncio through a front: tokens of the engine, whoever leaves; two processes: tests/engine/mesh."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvjax.engine import AsyncLLMEngine, AsyncProcessFront, FinishReason, ProcessFront, SamplingParams
from kvjax.engine.front import async_llm_engine
from kvjax.errors import EngineClosedError
from tests.engine.engines import assert_no_leak
from tests.engine.front.test_process_front import GREEDY, new_engine
from tests.models.golden_models import goldens_of

GOLDENS = goldens_of("llama")


def run(folder: Path, test: Callable[[AsyncProcessFront, ProcessFront], Awaitable[None]]) -> None:
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

    run(tmp_path, test)


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

    run(tmp_path, test)


def test_refusals_and_ends_reach_their_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(requests: AsyncProcessFront, front: ProcessFront) -> None:
        with pytest.raises(ValueError, match="300"):
            await requests.complete([5] * 300, GREEDY)
        front.close()
        with pytest.raises(EngineClosedError, match="the front is closed"):
            await requests.complete([5], GREEDY)

    run(tmp_path, test)
    other = ProcessFront(new_engine(), tmp_path / "other")
    other._index = 1
    with pytest.raises(ValueError, match="expected the front of process 0"):
        AsyncProcessFront(other)


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

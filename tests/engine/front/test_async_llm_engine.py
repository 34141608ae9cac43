"""The engine for asyncio: tokens of the synchronous engine, whoever comes, leaves, is slow or fails meanwhile."""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from kvjax.engine import AsyncLLMEngine, FinishReason, GenerationResult, LLMEngine, RequestOutput, SamplingParams
from kvjax.engine.requests.outputs import StepOutputs
from kvjax.engine.step.host_loop import HostStep
from kvjax.engine.step.model_runner import ModelRunner
from kvjax.errors import EngineClosedError, StepFailedError
from scripts.soak_async import Soak
from tests.engine.engines import FEW_BLOCKS, assert_no_leak, golden_prompts, make_engine
from tests.engine.failures import plant

NAME = "llama"
UPDATE_STEP = "kvjax.device.steps.update_step.UpdateStep.__call__"


def params_of(i: int, **settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8 + i, "temperature": 0.7, "seed": i} | settings)


@functools.cache
def expected() -> list[list[int]]:
    prompts = golden_prompts(NAME)
    results = make_engine(NAME).generate(prompts, [params_of(i) for i in range(len(prompts))])
    return [result.output_token_ids.tolist() for result in results]


@asynccontextmanager
async def serving(engine: LLMEngine | None = None, **options: Any) -> AsyncIterator[AsyncLLMEngine]:
    """Afterwards nothing is left in the engine, and its laws hold."""
    engine = make_engine(NAME, async_scheduling=True) if engine is None else engine
    async with AsyncLLMEngine(engine, **options) as front:
        yield front
        await settled(front)
    assert_no_leak(engine)
    assert front.stats.num_requests == front.stats.num_callers == 0


async def settled(front: AsyncLLMEngine) -> None:
    """Waits until nothing is in the engine."""
    while front.stats.num_requests:
        await asyncio.sleep(0.001)


async def tokens_of(front: AsyncLLMEngine, i: int) -> list[int]:
    return [token async for one in front.generate(golden_prompts(NAME)[i], params_of(i)) for token in one.token_ids]


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def test_tokens_are_those_of_the_synchronous_engine() -> None:
    async def test() -> None:
        async with serving() as front:
            count = len(golden_prompts(NAME))
            assert await asyncio.gather(*(tokens_of(front, i) for i in range(count))) == expected()
            results = await asyncio.gather(
                *(front.complete(golden_prompts(NAME)[i], params_of(i)) for i in range(count))
            )
            assert [result.output_token_ids.tolist() for [result] in results] == expected()
            assert front.stats.num_finished == 2 * count

    run(test)


def test_samples_of_a_prompt_come_mixed_and_complete_has_them_in_order() -> None:
    async def test() -> None:
        prompt, params = golden_prompts(NAME)[0], params_of(0, n=3)
        whole = [result.output_token_ids.tolist() for result in make_engine(NAME).generate([prompt], params)]
        async with serving() as front:
            results = await front.complete(prompt, params)
            assert [result.output_token_ids.tolist() for result in results] == whole
            tokens: list[list[int]] = [[], [], []]
            async for output in front.generate(prompt, params):
                tokens[output.sample] += output.token_ids
            assert tokens == whole
            with pytest.raises(ValueError, match=r"expected at most 128 samples \(max_requests\), got 129"):
                await front.complete(prompt, params_of(0, n=129))

    run(test)


def test_a_slow_reader_finds_its_tokens_merged_and_stalls_nobody() -> None:
    async def test() -> None:
        async with serving() as front:
            slow = front.generate(golden_prompts(NAME)[0], params_of(0, max_tokens=30))
            first = await anext(slow)
            assert await tokens_of(front, 1) == expected()[1]
            await settled(front)
            rest = [output async for output in slow]
            assert len(rest) == 1
            assert rest[0].result is not None
            assert [*first.token_ids, *rest[0].token_ids] == rest[0].result.output_token_ids.tolist()
            assert [*first.logprobs, *rest[0].logprobs] == list(rest[0].result.logprobs)

    run(test)


def pause_after_a_step(front: AsyncLLMEngine, then: Callable[[], object]) -> None:
    """The engine's next step is the last one until a command comes; `then` is called in this loop meanwhile."""
    step, loop, num_steps = front.engine.step, asyncio.get_running_loop(), front.stats.num_steps

    def paused_step() -> StepOutputs:
        if front.stats.num_steps > num_steps:
            front.engine.step = step
            loop.call_soon_threadsafe(then)
            with front._changed:
                front._changed.wait_for(lambda: front._commands)
        return step()

    front.engine.step = paused_step


@pytest.mark.parametrize("how", ["cancel", "timeout", "close", "break"])
def test_who_leaves_aborts_the_request(how: str) -> None:
    async def test() -> None:
        async with serving() as front:
            prompt, params = [1, 2, 3], params_of(0, max_tokens=130)
            if how == "cancel":
                task = asyncio.create_task(front.complete(prompt, params))
                pause_after_a_step(front, task.cancel)
                with pytest.raises(asyncio.CancelledError):
                    await task
            elif how == "timeout":
                limit = asyncio.timeout(None)
                pause_after_a_step(front, lambda: limit.reschedule(0))
                with pytest.raises(TimeoutError):
                    async with limit:
                        await front.complete(prompt, params)
            else:
                stream = front.generate(prompt, params)
                async for _ in stream:
                    break
                if how == "close":
                    await stream.aclose()
                del stream
            await settled(front)
            assert front.stats.num_aborted == 1
            assert await tokens_of(front, 1) == expected()[1]

    run(test)


def test_callers_wait_while_there_is_no_room_and_the_urgent_come_first() -> None:
    async def test() -> None:
        async with serving(max_requests=2) as front:
            order: list[str] = []

            async def call(name: str, priority: int) -> GenerationResult:
                [result] = await front.complete([1, 2], params_of(0, max_tokens=120), priority=priority)
                order.append(name)
                return result

            first = [asyncio.create_task(call(name, 0)) for name in "ab"]
            await asyncio.sleep(0)
            later = [asyncio.create_task(call(name, priority)) for name, priority in (("c", 2), ("d", 1), ("e", 1))]
            await asyncio.sleep(0)
            assert (front.stats.num_callers, front.stats.num_requests) == (3, 2)
            leaving = asyncio.create_task(call("f", 0))
            await asyncio.sleep(0)
            leaving.cancel()
            results = await asyncio.gather(*first, *later)
            assert len({tuple(result.output_token_ids.tolist()) for result in results}) == 1
            assert order[-1] == "c"
            assert "f" not in order

    run(test)


def test_refusals_reach_their_caller_alone() -> None:
    async def test() -> None:
        async with serving() as front:
            good = asyncio.create_task(tokens_of(front, 0))
            with pytest.raises(ValueError, match="has no tokenizer"):
                await front.complete("text")
            with pytest.raises(ValueError, match="at most 136 tokens"):
                async for _ in front.generate([1] * 130, params_of(0)):
                    pass
            with pytest.raises(TypeError, match="colour"):
                await front.complete([1], colour="red")
            assert await good == expected()[0]
            assert front.stats.num_failed == 0

    run(test)


def test_a_failed_step_reaches_every_caller_of_the_moment_and_nobody_after(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with serving() as front:
            dispatch = ModelRunner.dispatch

            def failing(runner: ModelRunner, step: HostStep) -> None:
                dispatch(runner, step)
                if front.stats.num_running == 4:
                    raise RuntimeError("planted")

            with monkeypatch.context() as patch:
                patch.setattr(ModelRunner, "dispatch", failing)
                calls = [front.complete([1, 2], params_of(i, max_tokens=120)) for i in range(4)]
                failures = await asyncio.gather(*calls, return_exceptions=True)
            for failure in failures:
                assert isinstance(failure, StepFailedError)
                assert isinstance(failure.__cause__, RuntimeError)
            assert len(set(map(id, failures))) == 4
            assert await asyncio.gather(*(tokens_of(front, i) for i in range(4))) == expected()[:4]
            assert (front.stats.num_failed, front.stats.num_finished) == (4, 4)

    run(test)


def test_an_engine_that_is_closed_says_so_to_callers_of_then_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: object) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED")

    async def test() -> None:
        front = AsyncLLMEngine(make_engine(NAME))
        with monkeypatch.context() as patch:
            async with front:
                plant(patch, UPDATE_STEP, {0: RuntimeError}, "before")
                patch.setattr("kvjax.engine.step.model_runner.create_pages", no_memory)
                for _ in range(2):
                    with pytest.raises(EngineClosedError, match="RESOURCE_EXHAUSTED"):
                        await tokens_of(front, 0)
                while front.is_running:
                    await asyncio.sleep(0.001)
        async with front:
            assert await tokens_of(front, 0) == expected()[0]
        assert_no_leak(front.engine)

    run(test)


def test_stopping_ends_all_callers_and_leaves_an_engine_that_serves() -> None:
    async def test() -> None:
        front = AsyncLLMEngine(make_engine(NAME, async_scheduling=True), max_requests=2)
        with pytest.raises(EngineClosedError, match="not started; use `async with` or call start"):
            await front.complete([1])
        front.start()
        with pytest.raises(ValueError, match="engine that does not run, got one that does"):
            front.start()
        tasks = [asyncio.create_task(front.complete([1, 2], params_of(i, max_tokens=120))) for i in range(4)]
        while front.stats.num_running < 2:
            await asyncio.sleep(0.001)
        await front.stop()
        for task in tasks:
            with pytest.raises(EngineClosedError, match=r"was stopped; call start\(\) to go on"):
                await task
        with pytest.raises(EngineClosedError, match="was stopped"):
            await front.complete([1])
        [result] = front.engine.generate([golden_prompts(NAME)[0]], params_of(0))
        assert result.output_token_ids.tolist() == expected()[0]
        assert_no_leak(front.engine)
        async with front:
            assert await tokens_of(front, 1) == expected()[1]

    run(test)


def test_callers_of_several_event_loops_share_an_engine() -> None:
    async def test() -> None:
        async with serving(max_requests=3) as front:
            found: list[list[int]] = [[]] * 6

            def in_its_own_loop(i: int) -> None:
                found[i] = asyncio.run(tokens_of(front, i))

            threads = [threading.Thread(target=in_its_own_loop, args=(i,)) for i in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                await asyncio.to_thread(thread.join)
            assert found == expected()[:6]

    run(test)


class WatchedCondition(threading.Condition):
    """Calls `on_wait` with the time limit before each wait."""

    def __init__(self, on_wait: Callable[[float | None], None]) -> None:
        super().__init__()
        self._on_wait = on_wait

    def wait(self, timeout: float | None = None) -> bool:
        self._on_wait(timeout)
        return super().wait(timeout)


def test_without_requests_the_thread_sleeps_until_it_is_woken() -> None:
    async def test() -> None:
        sleeps: queue.Queue[tuple[int, float | None]] = queue.Queue()  # steps before, time limit
        front = AsyncLLMEngine(make_engine(NAME, async_scheduling=True))
        front._changed = WatchedCondition(lambda limit_s: sleeps.put((front.stats.num_steps, limit_s)))
        async with front:
            await tokens_of(front, 0)
            while (last := await asyncio.to_thread(sleeps.get, timeout=60))[0] == 0:
                pass  # it slept before the request came
        assert last == (front.stats.num_steps, None)
        assert sleeps.empty()

    run(test)


def test_a_front_needs_an_engine_without_requests() -> None:
    engine = make_engine(NAME)
    engine.add_request([1])
    with pytest.raises(ValueError, match="engine without requests, got 1 unfinished"):
        AsyncLLMEngine(engine)
    engine.reset()
    with pytest.raises(ValueError, match="max_requests >= 1, got 0"):
        AsyncLLMEngine(engine, max_requests=0)


def test_text_comes_in_pieces() -> None:
    async def test() -> None:
        engine = make_engine("demo", async_scheduling=True)
        params = SamplingParams(max_tokens=24, temperature=0.0)
        async with serving(engine) as front:
            pieces: list[RequestOutput] = [one async for one in front.generate("let a = 1", params)]
            assert pieces[-1].result is not None
            assert pieces[-1].result.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
            assert "".join(one.text or "" for one in pieces) == pieces[-1].result.text

    run(test)


def test_clients_that_come_and_leave_at_random_get_their_own_tokens() -> None:
    """Three requests of each client of scripts/soak_async.py, with preemption."""
    engine = make_engine(NAME, async_scheduling=True, num_blocks=FEW_BLOCKS[NAME], max_num_batched_tokens=32)
    soak = Soak(engine, golden_prompts(NAME), seed=0, num_clients=60, max_requests=24, max_tokens=12)
    report = asyncio.run(soak.run(rounds=3))
    assert report.num_wrong == report.num_errors == 0
    assert report.num_complete > 10
    assert report.num_left > 10
    assert_no_leak(engine)


@pytest.mark.parametrize("priority", ["high", None, 1.5, float("nan"), 2**63, True, [1]])
def test_a_priority_that_is_none_is_refused_at_the_call_and_strands_nobody(priority: Any) -> None:
    """Callers wait for the one place, so priorities are compared."""

    async def test() -> None:
        async with serving(max_requests=1) as front:
            good = [asyncio.create_task(tokens_of(front, i)) for i in range(4)]
            await asyncio.sleep(0)
            for call in (front.generate, front.complete):
                with pytest.raises(ValueError, match=r"expected priority as an integer of 64 bits, lower is more"):
                    call([1, 2], priority=priority)
            assert await asyncio.gather(*good) == expected()[:4]

    run(test)


@pytest.mark.parametrize("where", ["_add", "_deliver", "_abandon", "_step", "_wake"])
def test_whatever_ends_the_thread_every_caller_is_told(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose prompt is queued, runs, is on its way to the engine or waits for a place; then it starts anew."""

    async def test() -> None:
        engine = make_engine(NAME, async_scheduling=True)
        front = AsyncLLMEngine(engine, max_requests=3)
        own, left = getattr(front, where), 4

        def fail(*args: Any) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise MemoryError("planted in the thread")
            own(*args)

        with monkeypatch.context() as patch:
            patch.setattr(front, where, fail)
            front.start()
            calls = [asyncio.create_task(tokens_of(front, i % 4)) for i in range(12)]
            if where == "_abandon":
                for _ in range(8):
                    leaver = front.generate([1, 2], params_of(0, max_tokens=100), priority=-1)
                    with suppress(EngineClosedError):
                        await anext(leaver)
                    await leaver.aclose()
            ends = await asyncio.gather(*calls, return_exceptions=True)
            with suppress(MemoryError):
                await front.stop()
        failed = [end for end in ends if not isinstance(end, list)]
        assert len(failed) >= 6
        for error in failed:
            assert isinstance(error, EngineClosedError)
            assert "the engine's thread has ended: MemoryError('planted" in str(error) or "stopped" in str(error)
        assert all(end in expected() for end in ends if isinstance(end, list))
        assert front.stats.num_requests == front.stats.num_callers == 0
        front.start()
        assert await asyncio.gather(*(tokens_of(front, i) for i in range(4))) == expected()[:4]
        await settled(front)
        await front.stop()
        assert_no_leak(engine)

    run(test)


def test_a_failed_request_that_is_left_late_does_not_end_a_later_one_of_its_id() -> None:
    async def test() -> None:
        async with serving() as front:
            first = front.generate([1, 2], params_of(0, max_tokens=100), request_id="a")
            await anext(first)
            front.engine.reset()
            await front.stop()
            front.start()
            second = asyncio.create_task(front.complete([1, 2], params_of(0), request_id="a"))
            await asyncio.sleep(0.01)
            await first.aclose()
            [result] = await second
            assert result.finish_reason is FinishReason.LENGTH

    run(test)

"""Statistics of steps: what is counted as the host's time, and what pools hold."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.core import Request
from kvjax.engine.requests.engine_request import EngineRequest
from kvjax.engine.requests.sampling_params import SamplingParams
from kvjax.engine.requests.stats import RequestStats
from kvjax.engine.scheduling.running_rows import RunningRows
from kvjax.engine.step import host_loop
from tests.engine.fake_model import FakeEngine


@pytest.mark.parametrize("depth", [1, 2])
def test_the_hosts_time_is_that_of_its_two_halves_without_the_device(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(depth=depth)
    now_us = 0

    def costs(owner: object, name: str, cost_us: int) -> None:
        call = getattr(owner, name)

        def timed(*args: object, **options: object) -> object:
            nonlocal now_us
            now_us += cost_us
            return call(*args, **options)

        monkeypatch.setattr(owner, name, timed)

    costs(engine.scheduler, "schedule", 3)
    costs(engine.scheduler, "start", 10)
    costs(engine.device, "run", 1_000)
    costs(engine.scheduler, "update", 50)
    monkeypatch.setattr(host_loop.time, "thread_time", lambda: now_us * 1e-6)
    engine.add("a", [1, 2, 3], 4)
    engine.run()
    assert len(engine.loop.step_stats) >= 4
    assert [round(step.host_us, 3) for step in engine.loop.step_stats] == [63.0] * len(engine.loop.step_stats)


def test_the_pools_use_is_told_by_counting_its_blocks() -> None:
    engine = FakeEngine(num_blocks=40, max_num_batched_tokens=8)
    for i in range(6):
        engine.add(f"r{i}", list(range(20 * (i // 2), 20 * (i // 2) + 13)), 9)
    pool, seen = engine.manager.block_pool, set()
    while engine.scheduler.num_unfinished:
        engine.step()
        [use] = engine.loop.step_stats[-1].pools
        free = [i for i in range(1, 40) if pool.ref_count[i] == 0]
        cached = [i for i in free if pool.block_hash_of(i) is not None]
        assert (use.held, use.cached, use.free) == (39 - len(free), len(cached), len(free) - len(cached))
        seen.add(use)
    assert len(seen) > 10


def test_rows_keep_what_their_request_needs_however_many_there_are() -> None:
    """Log-probabilities of 300 tokens of 40 requests in shuffled rows, starting and stopping in between."""
    rng, rows = np.random.default_rng(0), RunningRows(1)
    requests: dict[int, EngineRequest] = {}
    expected: dict[int, list[float]] = {}
    for step in range(300):
        free = [row for row in range(40) if row not in requests]
        for row in rng.permutation(free)[: 2 if step else 5].tolist():
            request = Request(f"r{step}.{row}", [1, 2, 3])
            params = SamplingParams(max_tokens=int(rng.integers(1, 400)))
            stats = RequestStats(request.request_id, 3, 0.0)
            stop = frozenset(rng.integers(0, 50, rng.integers(0, 4)).tolist())
            requests[row] = EngineRequest(request, params, 0, stop, step, stats)
            expected[row] = []
            rows.start(row, requests[row])
        order = rng.permutation(list(requests))
        lengths = np.array([3 + len(expected[row]) for row in order.tolist()])
        tokens = np.where(rng.random(order.size) < 0.1, rng.integers(0, 50, order.size), 1_000).astype(np.int32)
        logprobs = rng.random(order.size, np.float32)
        may_end = rows.append(order, lengths, tokens, logprobs)
        for row, token, logprob, ends in zip(order.tolist(), tokens.tolist(), logprobs.tolist(), may_end, strict=True):
            expected[row].append(logprob)
            has_all = len(expected[row]) >= requests[row].params.max_tokens
            assert ends == (has_all or token in requests[row].stop_token_ids)
            if ends:
                request = requests.pop(row)
                rows.stop(row, 3 + len(expected[row]))
                assert request.logprobs == expected.pop(row)
    assert max(map(len, expected.values())) > 100

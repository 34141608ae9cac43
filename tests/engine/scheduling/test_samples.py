"""Several samples of one prompt: forked from the first where there is room, and the same tokens as alone. No jax."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvjax.engine.requests.outputs import FinishReason
from tests.engine.fake_model import FakeEngine, expected_output
from tests.engine.scheduling.test_scheduler import workload

PROMPT = list(range(100, 110))  # two blocks and a half


def run(n: int, prompt: list[int], **settings: Any) -> FakeEngine:
    engine = FakeEngine(**settings)
    engine.add("a", prompt, 6, n=n)
    assert engine.run() == {name: expected_output(prompt, 6) for name in engine.requests}
    return engine


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("enable_caching", [True, False])
@pytest.mark.parametrize(
    ("num_blocks", "limits"),
    [
        (300, {}),
        (300, {"max_num_batched_tokens": 9, "max_num_seqs": 9}),
        (300, {"max_num_seqs": 1}),
        (300, {"max_num_batched_tokens": 64, "max_num_seqs": 3}),
        (34, {"max_num_batched_tokens": 8}),
    ],
)
def test_every_schedule_gives_the_same_tokens(
    depth: int, enable_caching: bool, num_blocks: int, limits: dict[str, int]
) -> None:
    num_copies = 0
    for seed in range(4):
        rng = np.random.default_rng(seed)
        engine = FakeEngine(num_blocks, depth=depth, enable_caching=enable_caching, zero_new_pages=seed > 1, **limits)
        expected = {}
        for name, prompt, count in workload(seed, 8):
            before = set(engine.requests)
            engine.add(name, prompt, count, n=int(rng.integers(1, 6)))
            expected |= dict.fromkeys(engine.requests.keys() - before, expected_output(prompt, count))
        assert engine.run() == expected
        num_copies += engine.device.num_copies
    assert bool(num_copies) == (limits.get("max_num_seqs") != 1)


@pytest.mark.parametrize("depth", [1, 2])
def test_samples_share_the_prompts_pages(depth: int) -> None:
    engine = run(5, PROMPT, depth=depth)
    stats = [request.stats for request in engine.requests.values()]
    assert [one.num_cached_tokens for one in stats] == [0, 9, 9, 9, 9]
    assert [one.num_shared_tokens for one in stats] == [0, 9, 9, 9, 9]
    assert [one.num_computed_tokens for one in stats] == [15, 6, 6, 6, 6]  # all but the last token
    assert engine.device.num_copies == 2 * 4  # of the block of tokens 8 to 11, per group for all who write but one


def test_a_prompt_of_whole_blocks_is_copied_for_its_last_token() -> None:
    assert run(3, PROMPT[:8]).device.num_copies == 2 * 2
    assert run(3, PROMPT[:9]).device.num_copies == 0  # the last token is the first of its block


def test_samples_without_a_row_are_admitted_later() -> None:
    engine = run(5, PROMPT, max_num_seqs=2)
    assert [request.stats.num_cached_tokens for request in engine.requests.values()] == [0, 9, 8, 8, 8]
    assert [request.stats.num_shared_tokens for request in engine.requests.values()] == [0, 9, 0, 0, 0]
    assert list(engine.requests) == ["a", "a.1", "a.2", "a.3", "a.4"]


def test_a_prompt_of_one_token_is_computed_by_each_sample() -> None:
    engine = run(3, [7])
    assert [request.stats.num_cached_tokens for request in engine.requests.values()] == [0, 0, 0]


def test_requests_behind_the_samples_wait_for_them() -> None:
    engine = FakeEngine(max_num_batched_tokens=8)
    engine.add("a", PROMPT, 6, n=2)
    engine.add("b", [1, 2, 3], 4)
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["a"]
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["a", "a.1"]
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["a", "a.1", "b"]
    engine.run()


@pytest.mark.parametrize("after", range(5))
@pytest.mark.parametrize("depth", [1, 2])
def test_the_others_go_on_without_the_first(depth: int, after: int) -> None:
    engine = FakeEngine(depth=depth, max_num_batched_tokens=8)
    engine.add("a", PROMPT, 6, n=4)
    for _ in range(after):
        engine.step()
    engine.scheduler.abort(engine.requests["a"])
    assert engine.requests["a"].finish_reason is FinishReason.ABORT
    outputs = engine.run()
    assert all(outputs[name] == expected_output(PROMPT, 6) for name in ("a.1", "a.2", "a.3"))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [34, 200])
def test_hits_inside_blocks_give_the_same_tokens(depth: int, num_blocks: int) -> None:
    inside = 0
    for seed in range(6):
        requests = workload(seed)
        engine = FakeEngine(num_blocks, depth=depth, sub_block_hits=True, max_num_batched_tokens=8)
        for i, request in enumerate(requests):
            engine.add(*request, n=1 + i % 2)
        outputs = engine.run()
        for name, prompt, count in requests:
            assert outputs[name] == expected_output(prompt, count)
            inside += (engine.requests[name].stats.num_cached_tokens or 0) % 4 > 0
        assert engine.device.num_copies > 0
    assert inside > 6

"""Laws of speculation: the tokens of a schedule without drafts, whatever a drafter says. No jax.

The fake model verifies drafts by what is in the blocks, so KV and states of rejected drafts that anything reads change
the output.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvjax.core import Request
from kvjax.engine.requests.engine_request import RequestStatus
from kvjax.engine.requests.outputs import FinishReason
from kvjax.engine.scheduling.draft_shares import levelled
from tests.engine.fake_model import (
    FakeEngine,
    expected_output,
    expected_output_with_states,
)
from tests.engine.scheduling.fake_drafters import FakeDrafter, Say, all_right, all_wrong, some_right
from tests.engine.scheduling.test_scheduler import Workload, workload

SAYINGS = [all_right, all_wrong, some_right]


def engine_with(
    say: Say, num_drafts: int, *, on_device: bool = False, seed: int = 0, num_states: int = 0, **options: Any
) -> FakeEngine:
    expected: Callable[[list[int], int], list[int]] = expected_output_with_states if num_states else expected_output
    make_drafter = partial(
        FakeDrafter, say=say, num_drafts=num_drafts, expected=expected, on_device=on_device, seed=seed
    )
    return FakeEngine(make_drafter=make_drafter, num_drafts=num_drafts, num_states=num_states, **options)


def run_all(engine: FakeEngine, requests: Workload) -> FakeEngine:
    for request in requests:
        engine.add(*request)
    engine.run()
    return engine


@pytest.mark.parametrize("say", SAYINGS)
@pytest.mark.parametrize("num_states", [0, 200])
def test_what_is_cached_is_what_a_schedule_without_drafts_caches(say: Say, num_states: int) -> None:
    """Every prefix of every request hits as long a part, blocks that a request's last drafts filled included."""
    requests = [(name, prompt, 20 + count) for name, prompt, count in workload(3, num_requests=6)]
    drafting = engine_with(say, 3, num_blocks=300, num_states=num_states)
    hits = []
    for engine in (drafting, FakeEngine(num_blocks=300, num_states=num_states)):
        run_all(engine, requests)
        engine.manager.new_step_starts()
        texts = [prompt + engine.outputs[name] for name, prompt, _ in requests]
        prefixes = [text[:length] + [9] for text in texts for length in range(1, len(text))]
        hits.append(
            [
                engine.manager.get_computed_blocks(Request("hit", prefix, block_hasher=engine.hasher))[1]
                for prefix in prefixes
            ]
        )
    assert hits[0] == hits[1]
    assert max(hits[0]) > 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("place", range(9))
def test_a_stop_token_among_accepted_drafts_cuts_the_rest(depth: int, place: int) -> None:
    prompt = [1, 2, 3]
    expected = expected_output(prompt, 12)
    engine = engine_with(all_right, 4, depth=depth)
    engine.add("a", prompt, 12, stop_token_ids=(expected[place],))
    engine.add("b", prompt, 12)
    engine.run()
    assert engine.outputs == {"a": expected[: place + 1], "b": expected}
    assert [engine.results[name].finish_reason for name in "ab"] == [FinishReason.STOP, FinishReason.LENGTH]


@pytest.mark.parametrize("max_tokens", range(1, 12))
@pytest.mark.parametrize("num_drafts", [1, 4])
def test_max_tokens_are_never_exceeded_nor_drafted_for(max_tokens: int, num_drafts: int) -> None:
    """With all drafts right every step but the first two brings 1 + k tokens, until fewer are left."""
    engine = engine_with(all_right, num_drafts)
    engine.add("a", [5, 6, 7], max_tokens)
    engine.run()
    assert engine.outputs["a"] == expected_output([5, 6, 7], max_tokens)
    assert len(engine.steps) == 1 + -(-(max_tokens - 1) // (1 + num_drafts))
    stats = engine.results["a"].stats
    assert stats.num_draft_tokens == stats.num_accepted_tokens == max_tokens - len(engine.steps)


def test_a_decoding_request_is_in_one_step_at_a_time() -> None:
    """Steps overlap where prompts are computed, and share no request that samples."""
    engine = engine_with(some_right, 3, depth=2, max_num_batched_tokens=12)
    for request in workload(3):
        engine.add(*request)
    num_overlaps = 0
    while engine.scheduler.num_unfinished:
        unread = [step.scheduled for step, _ in engine._flights]
        num_steps = len(engine.steps)
        engine.step()
        for new in engine.steps[num_steps:]:
            sampling = [row for step in [*unread, new] for row in step.rows[step.samples].tolist()]
            assert len(sampling) == len(set(sampling))
            num_overlaps += len(unread)
    assert num_overlaps > 3


def test_requests_that_decode_do_not_fall_into_groups_that_take_turns() -> None:
    """Two prompts end in different steps; from then on both are in every step, though two may be in flight."""
    engine = engine_with(some_right, 3, depth=2, max_num_batched_tokens=8)
    engine.add("a", list(range(6)), 20)
    engine.add("b", list(range(10, 20)), 20)
    engine.run()
    both = [step.rows.size == 2 for step in engine.steps if not (step.num_new_tokens - step_drafts(step) > 1).any()]
    first = both.index(True)
    assert first <= 2
    assert all(both[first : len(both) - 4])


def step_drafts(step: Any) -> np.ndarray:
    return np.zeros_like(step.rows) if step.num_drafts is None else step.num_drafts


def test_prompts_and_admissions_take_tokens_before_drafts() -> None:
    engine = engine_with(all_right, 4, max_num_batched_tokens=10)
    engine.add("a", [1, 2, 3], 30)
    engine.step()
    engine.add("b", list(range(30)), 4)
    while "b" not in [request.request_id for request in engine.scheduler.running]:
        engine.step()
    step = engine.steps[-1]
    assert step.num_new_tokens.tolist() == [1, 9]
    assert step.num_drafts is None


def test_drafts_are_shared_evenly() -> None:
    """Of a step's 14 tokens four requests take one each; ten are left for drafts."""
    engine = engine_with(all_right, 4, max_num_batched_tokens=14)
    for i in range(4):
        engine.add(f"r{i}", [i, i + 1, i + 2], 40)
    engine.step()
    engine.step()
    assert engine.steps[-1].num_drafts is not None
    assert engine.steps[-1].num_drafts.tolist() == [3, 3, 2, 2]


@pytest.mark.parametrize("seed", range(30))
def test_levelling_takes_nothing_from_one_that_another_of_more_keeps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    wanted = rng.integers(0, 6, rng.integers(1, 9))
    budget = int(rng.integers(0, 30))
    shares = levelled(wanted, budget)
    assert int(shares.sum()) == min(budget, int(wanted.sum()))
    assert ((shares >= 0) & (shares <= wanted)).all()
    cut = shares[shares < wanted]
    assert not cut.size or int(shares.max()) <= int(cut.min()) + 1


def test_nobody_is_preempted_for_drafts() -> None:
    """A pool that just holds two requests to their ends, whose drafts would need more in between."""
    prompts = [list(range(i, i + 9)) for i in (0, 100)]
    for num_blocks in range(12, 22):
        counts = []
        for say in (None, all_right):
            options: dict[str, Any] = {"num_blocks": num_blocks, "enable_caching": False, "max_num_batched_tokens": 32}
            engine = FakeEngine(**options) if say is None else engine_with(say, 7, **options)
            for i, prompt in enumerate(prompts):
                engine.add(f"r{i}", prompt, 11)
            engine.run()
            counts.append(sum(step.num_preemptions for step in engine.steps))
        assert counts[1] <= counts[0]


def test_a_preempted_request_keeps_what_its_drafts_in_flight_bring() -> None:
    engine = engine_with(all_right, 3, depth=2)
    engine.add("a", [1, 2, 3], 20)
    for _ in range(5):
        engine.step()
    assert engine._flights
    before = len(engine.outputs["a"])
    engine.scheduler.preempt_last()
    assert engine.requests["a"].status is RequestStatus.WAITING
    engine.step()
    assert len(engine.outputs["a"]) > before
    engine.run()
    assert engine.outputs["a"] == expected_output([1, 2, 3], 20)


def test_stats_count_drafts_and_those_accepted() -> None:
    engine = engine_with(some_right, 3, num_blocks=34, max_num_batched_tokens=12)
    drafter = engine.drafter
    assert isinstance(drafter, FakeDrafter)
    run_all(engine, [(name, prompt, 15) for name, prompt, _ in workload(2)])
    steps = list(engine.loop.step_stats)
    results = [result.stats for result in engine.results.values()]
    assert sum(step.num_draft_tokens for step in steps) == sum(stats.num_draft_tokens for stats in results) > 50
    assert sum(step.num_accepted_tokens for step in steps) == sum(stats.num_accepted_tokens for stats in results) > 20
    assert sum(step.num_sampled_tokens for step in steps) == sum(map(len, engine.outputs.values()))
    for name, result in engine.results.items():
        num_sampling = sum(bool((step.samples & (step.request_ids == name)).any()) for step in engine.steps)
        assert num_sampling + result.stats.num_accepted_tokens == len(engine.outputs[name])

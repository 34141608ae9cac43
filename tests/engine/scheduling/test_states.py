"""Recurrent layers through the scheduler: the tokens of one request alone, whatever the schedule. No jax.

The fake model's state is a checksum of all tokens before it, so a state of the wrong length changes every token after
it.
"""

from __future__ import annotations

import pytest

from kvjax.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from tests.engine.fake_model import FakeEngine, expected_output_with_states, make_manager

PROMPT = list(range(100, 122))  # two blocks of states and a part of a third


@pytest.mark.parametrize("depth", [1, 2])
def test_samples_share_the_state_before_the_prompts_last_token(depth: int) -> None:
    """The first computes that token in a step of its own; the others are forked before it."""
    engine = FakeEngine(300, num_states=100, depth=depth, max_num_batched_tokens=64)
    engine.add("a", PROMPT, 6, n=5)
    assert engine.run() == {name: expected_output_with_states(PROMPT, 6) for name in engine.requests}
    stats = [request.stats for request in engine.requests.values()]
    assert [one.num_shared_tokens for one in stats] == [0, 21, 21, 21, 21]
    assert [one.num_computed_tokens for one in stats] == [27, 6, 6, 6, 6]
    assert [step.num_new_tokens.tolist() for step in engine.steps[:3]] == [[16], [5], [1] * 5]


@pytest.mark.parametrize("length", range(2, 20))
@pytest.mark.parametrize("depth", [1, 2])
def test_samples_of_every_length_of_prompt(length: int, depth: int) -> None:
    engine = FakeEngine(300, num_states=100, depth=depth)
    prompt = PROMPT[:length]
    engine.add("a", prompt, 6, n=3)
    engine.add("b", prompt + [7] * 9, 6)
    expected = expected_output_with_states(prompt, 6)
    outputs = engine.run()
    assert [outputs[name] for name in ("a", "a.1", "a.2")] == [expected] * 3
    assert outputs["b"] == expected_output_with_states(prompt + [7] * 9, 6)
    assert engine.requests["a.1"].stats.num_shared_tokens == length - 1


def test_steps_of_a_prompt_end_where_blocks_of_states_end() -> None:
    """But for the last one; so every block of states of a prompt is a hit for the next request."""
    engine = FakeEngine(300, num_states=100, max_num_batched_tokens=15)
    engine.add("a", PROMPT, 2)
    engine.run()
    assert [step.num_new_tokens.tolist() for step in engine.steps] == [[8], [8], [6], [1]]
    for length, hit in ((9, 8), (16, 8), (17, 16), (22, 16)):
        engine.add(f"b{length}", PROMPT[:length], 2)
        engine.run()
        assert engine.requests[f"b{length}"].stats.num_cached_tokens == hit


def test_a_prompt_waits_while_the_budget_reaches_no_end_of_a_block() -> None:
    engine = FakeEngine(300, num_states=100, max_num_batched_tokens=15)
    engine.add("a", PROMPT[:8], 3)
    engine.add("b", PROMPT[1:], 3)
    engine.run()
    assert [step.num_new_tokens.tolist() for step in engine.steps[:3]] == [[8], [1, 8], [1, 8]]


def test_steps_without_room_for_a_block_of_states_are_refused() -> None:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=7, max_model_len=64)
    message = "expected max_num_batched_tokens of at least 8, the tokens of a block of recurrent states, got 7"
    with pytest.raises(ValueError, match=message):
        Scheduler(make_manager(64, num_states=20), config)
    Scheduler(make_manager(64, num_states=20, enable_caching=False), config)

"""Several samples of one prompt: forked from the first where there is room, and the same tokens as alone. No jax."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.fake_model import FakeEngine, expected_output

PROMPT = list(range(100, 110))  # two blocks and a half


def run(n: int, prompt: list[int], **settings: Any) -> FakeEngine:
    engine = FakeEngine(**settings)
    engine.add("a", prompt, 6, n=n)
    assert engine.run() == {name: expected_output(prompt, 6) for name in engine.requests}
    return engine


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

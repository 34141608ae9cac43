"""Laws of what is shown of an engine: the picture of its pools adds up, and so do speeds."""

from __future__ import annotations

import pytest

from kvjax.engine.front.pool_picture import CACHED, FREE, HELD, pool_picture
from kvjax.engine.requests.stats import PoolUse, RequestStats, StepStats


def step_stats(held: int, cached: int, free: int, **kwargs: int) -> StepStats:
    values = {"num_hit_tokens": 0, "num_refound_tokens": 0, "num_preemptions": 0, "released": 0, **kwargs}
    return StepStats(
        step=0,
        num_running=1,
        num_waiting=0,
        num_requests=1,
        num_new_tokens=1,
        num_sampled_tokens=1,
        num_hit_tokens=values["num_hit_tokens"],
        num_queried_tokens=1,
        num_refound_tokens=values["num_refound_tokens"],
        num_preemptions=values["num_preemptions"],
        host_us=1.0,
        pools=(PoolUse(held, cached, free, values["released"]),),
    )


def test_the_picture_shows_what_is_there() -> None:
    lines = pool_picture([step_stats(1, 0, 99), step_stats(50, 49, 1), step_stats(0, 100, 0)], 0, height=4)
    columns = ["".join(line[13 + i] for line in reversed(lines[1:5])) for i in range(3)]
    assert columns == [HELD + 3 * FREE, 2 * HELD + 2 * CACHED, 4 * CACHED]


def test_long_runs_are_drawn_in_bins_that_add_up() -> None:
    steps = [step_stats(1, 1, 1, released=1, num_hit_tokens=3, num_refound_tokens=2) for _ in range(1000)]
    lines = pool_picture(steps, 0, width=50)
    assert all(len(line) <= 13 + 50 + 10 for line in lines)
    assert any("released" in line and line.endswith("1,000") for line in lines)
    assert any("hit tokens" in line and line.endswith("3,000") for line in lines)
    assert any("refound" in line and line.endswith("2,000") for line in lines)
    assert not any("preempted" in line for line in lines)


def test_pictures_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one step"):
        pool_picture([], 0)
    with pytest.raises(ValueError, match="width and height >= 1, got 0 and 8"):
        pool_picture([step_stats(1, 1, 1)], 0, width=0)


def test_speeds_need_two_tokens_and_an_end() -> None:
    stats = RequestStats("a", num_prompt_tokens=3, arrival_time_s=1.0)
    assert stats.time_to_first_token_s is None
    assert stats.output_tokens_per_s is None
    stats.first_token_time_s, stats.finish_time_s, stats.num_output_tokens = 2.0, 4.0, 5
    assert stats.time_to_first_token_s == 1.0
    assert stats.output_tokens_per_s == 2.0

"""`kvjax generate --plot`: a bar per step, whose parts are the pool."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("matplotlib")

from kvjax.cli.generate.plot import draw_pools, title_of
from kvjax.cli.pictures.colors import CACHED, EMPTY, HELD, HIT, PREEMPTED, RELEASED
from kvjax.engine.requests.stats import PoolUse, StepStats
from tests.cli.pictures.reading import assert_readable, color_of, entries_of, labelled

ZERO = dict.fromkeys(
    ("num_running", "num_waiting", "num_requests", "num_new_tokens", "num_sampled_tokens", "num_queried_tokens"), 0
)


def step(number: int, hits: int, preemptions: int, *pools: tuple[int, int, int, int]) -> StepStats:
    uses = tuple(PoolUse(*pool) for pool in pools)
    return StepStats(step=number, num_hit_tokens=hits, num_preemptions=preemptions, host_us=1.0, pools=uses, **ZERO)


STEPS = [step(1, 0, 0, (3, 0, 7, 0)), step(2, 32, 1, (5, 2, 3, 1)), step(3, 16, 1, (2, 6, 2, 0))]


def heights(container: object) -> list[float]:
    return [bar.get_height() for bar in container]  # type: ignore[attr-defined]


def test_a_bar_is_a_step_and_its_parts_are_the_pool() -> None:
    figure = draw_pools(STEPS, "2 requests: 48 % of the prompt tokens were found in the cache")
    assert_readable(figure)
    pool, hits, released = figure.axes
    parts = labelled(pool)
    assert {name: color_of(drawn) for name, drawn in parts.items()} == {
        "held by requests": HELD,
        "cached, may be evicted": CACHED,
        "empty": EMPTY,
        "a request was preempted": PREEMPTED,
    }
    assert [heights(parts[name]) for name in ("held by requests", "cached, may be evicted", "empty")] == [
        [3, 5, 2],
        [0, 2, 6],
        [7, 3, 2],
    ]
    assert pool.get_title(loc="left") == "What is in the 10 blocks of the pool"
    assert pool.get_ylim() == (0, 10)
    assert (heights(hits.containers[0]), color_of(hits.containers[0])) == ([0, 32, 16], HIT)
    assert (heights(released.containers[0]), color_of(released.containers[0])) == ([0, 1, 0], RELEASED)
    assert [[line.get_xdata()[0] for line in axis.lines] for axis in figure.axes] == 3 * [[2, 3]]
    assert entries_of(figure) == list(parts)


def test_a_panel_per_pool_and_none_of_what_did_not_happen() -> None:
    """Without windows and preemptions."""
    steps = [replace(step(n, n, 0, (n, 1, 9 - n, 0), (1, n, 5 - n, 0))) for n in (1, 2, 3)]
    figure = draw_pools(steps, "3 requests")
    assert_readable(figure)
    assert [axis.get_title(loc="left") for axis in figure.axes] == [
        "What is in the 10 blocks of pool 0",
        "What is in the 6 blocks of pool 1",
        "Prompt tokens found in the cache",
    ]
    assert "a request was preempted" not in entries_of(figure)


def test_the_title_says_what_was_found_and_whether_all_ended() -> None:
    found = "3 requests: 48 % of the prompt tokens were found in the cache"
    assert title_of(3, 0.4789, 0) == found
    assert title_of(3, 0.4789, 2) == f"{found}\ninterrupted after 1 of 3"

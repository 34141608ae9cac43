"""The model of a DMA's latency, against rings that are played step by step; what listings say of a kernel's ring."""

from __future__ import annotations

from itertools import product

import pytest

from scripts.lab.tpu.chips import CHIPS
from scripts.lab.tpu.latency import Ring, Work
from scripts.lab.tpu.score import block_loops, block_scores, ring_of
from tests.scripts.tpu.tpu_listing import PRODUCT, START, WAIT, Part, kernel, loop


def played_step(when: str, buffers: int, transfer: float, work: float, latency: float) -> float:
    """A step of many: one after the other, each waits for its bytes, works and starts another's DMA.

    HBM moves the bytes of one DMA after those of another, and a DMA's bytes come `latency` after its start at least.
    """
    num_steps = 600
    now, hbm_free, arrived = 0.0, 0.0, [0.0] * (num_steps + buffers)

    def start(step: int) -> None:
        nonlocal hbm_free
        hbm_free = max(hbm_free, now + latency) + transfer
        arrived[step] = hbm_free

    ahead = buffers if when == "after the work" else buffers - 1
    for step in range(ahead):
        start(step)
    ends = []
    for step in range(num_steps):
        if when == "before the wait":
            start(step + ahead)
        now = max(now, arrived[step])
        if when == "between":
            start(step + ahead)
        now += work
        if when == "after the work":
            start(step + ahead)
        ends.append(now)
    return (ends[-1] - ends[300]) / (num_steps - 301)


@pytest.mark.parametrize("when", ["before the wait", "after the work", "between"])
@pytest.mark.parametrize("buffers", [2, 3, 4, 8])
def test_a_step_lasts_what_a_ring_needs_that_is_played(when: str, buffers: int) -> None:
    ring = Ring(buffers, starts_between=when == "between")
    for transfer, work, latency in product((0.1, 0.6, 1.0), (0.05, 0.6, 1.3), (0.0, 0.5, 2.0)):
        expected = played_step(when, buffers, transfer, work, latency)
        assert ring.step_seconds(transfer, work, latency) == pytest.approx(expected, rel=0.02)


def test_one_buffer_hides_nothing() -> None:
    for starts_between in (False, True):
        assert Ring(1, starts_between).step_seconds(0.25, 0.5, 1.0) == 1.75


def test_two_buffers_wait_for_latency_where_four_do_not() -> None:
    """8 heads at 8k on v7x: 14.9 us with two buffers of 2 MiB at L = 1 us, HBM's 9.1 with four."""
    chip = CHIPS["v7x"]
    pair, four = (Work(10_250, 8192 * 4096, 16, Ring(buffers)) for buffers in (2, 4))
    assert round(pair.seconds(chip, 1e-6) * 1e6, 1) == 14.9
    assert round(pair.hbm_seconds(chip) * 1e6, 1) == 9.1
    assert four.seconds(chip, 1e-6) == pytest.approx(four.hbm_seconds(chip))


def test_bytes_in_flight() -> None:
    assert Ring(4).in_flight_bytes(100) == 400
    assert Ring(4, starts_between=True).in_flight_bytes(100) == 300
    assert Ring(1, starts_between=True).in_flight_bytes(100) == 100


MASKED = loop(WAIT, PRODUCT, 30)


STARTS_FIRST = loop(2, START, 7, WAIT, 20, PRODUCT, 8)  # 45 bundles each
STARTS_BETWEEN = loop(2, WAIT, 7, START, 20, PRODUCT, 8)
STARTS_LAST = loop(2, WAIT, 20, PRODUCT, 8, START, 7)


@pytest.mark.parametrize(
    ("name", "loops", "expected", "hidden"),
    [
        ("rpa_q1_b512_p128_t1", [STARTS_FIRST], Ring(2), 45 + 8),
        ("rpa_q1_b512_p128_t1_n4", [STARTS_FIRST], Ring(4), 3 * 45 + 8),
        ("rpa_q1_b512_p128_t1_n3", [STARTS_BETWEEN], Ring(3, starts_between=True), 2 * 45 - 8),
        ("rpa_q1_b512_p128_t1_n4", [STARTS_LAST, 2, MASKED], Ring(4), 4 * 45 - 30),
        ("rpa_q1_b512_p128_t1_n4", [STARTS_BETWEEN, 2, MASKED], Ring(4), 4 * 45 - 8),
    ],
)
def test_what_a_listing_says_of_its_ring(name: str, loops: list[Part], expected: Ring, hidden: int) -> None:
    """Buffers by name; which block a step starts by the number of loops; what hides it by start and wait.

    Where a block takes the place of the step's own, the compiler may start it as soon as that has been loaded.
    """
    found = kernel(name, loop(3, *loops, 2, MASKED))
    assert ring_of(found) == (expected, hidden)
    scores = block_scores(found, CHIPS["v7x"], 4096)
    assert [score.hidden_bundles for score in scores] == [hidden, hidden]
    assert scores[0].bundles == 45
    assert scores[0].in_flight_bytes == expected.in_flight_bytes(512 * 4096)
    slow = scores[0].seconds(CHIPS["v7x"], 2e-6)
    assert slow == expected.step_seconds(512 * 4096 / 3.69e12, 45 / 2.2e9, 2e-6)


def test_loops_inside_a_loop_over_items_inside_a_grid() -> None:
    """Kernels of two loops over blocks, and of three with a loop over items inside the grid's."""
    two = block_loops(kernel("rpa_q1_b512_p128_t1", loop(2, loop(PRODUCT), MASKED)))
    assert (len(two.outer), two.other_full) == (1, None)
    three = block_loops(kernel("rpa_q1_b512_p128_t1_n4", loop(4, loop(2, loop(PRODUCT), 3, loop(PRODUCT, 9), MASKED))))
    assert len(three.outer) == 2
    assert three.other_full is not None
    assert (three.full.num_bundles, three.other_full.num_bundles) == (6, 15)

"""When drafts are worth a step: what is expected of them, from what became of earlier ones. No jax."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.engine.drafts.draft_gate import FIRST_RATE, FORGETS, DraftGate
from kvjax.engine.scheduling.speculation import SpeculativeConfig


def gate_of(num_rows: int, least_gain: float) -> DraftGate:
    gate = DraftGate(least_gain)
    gate.reserve(num_rows)
    return gate


def opens(gate: DraftGate, counts: list[int], num_tokens: int = 0) -> bool:
    rows = np.arange(len(counts))
    given = np.array(counts)
    opened = gate.opened(rows, np.full(rows.size, num_tokens), given)
    assert opened.tolist() in (counts, [0] * len(counts)), "all drafts or none"
    return bool(opened.any())


def settle(gate: DraftGate, row: int, num_drafts: int, num_accepted: int, num_tokens: int = 0) -> None:
    gate.settle(*(np.array([x]) for x in (row, num_tokens, num_drafts, num_accepted)))


@pytest.mark.parametrize("num_with_drafts", range(9))
def test_a_step_drafts_where_enough_rows_have_one(num_with_drafts: int) -> None:
    """Of eight new rows each draft is right every other time."""
    counts = [1] * num_with_drafts + [0] * (8 - num_with_drafts)
    assert opens(gate_of(8, 0.3), counts) == (num_with_drafts * FIRST_RATE >= 0.3 * 8)


def test_without_a_least_gain_every_draft_is_made() -> None:
    gate = gate_of(8, 0.0)
    for _ in range(9):
        settle(gate, 0, 4, 0)
    assert opens(gate, [1] + [0] * 7)


def test_rows_whose_drafts_are_right_draft_alone() -> None:
    """Four drafts that are right expect four tokens for four rows; wrong ones less than one."""
    right, wrong = gate_of(4, 0.7), gate_of(4, 0.7)
    for _ in range(6):
        settle(right, 0, 4, 4)
        settle(wrong, 0, 4, 0)
    assert opens(right, [4, 0, 0, 0])
    assert not opens(wrong, [4, 0, 0, 0])


def test_a_refused_row_is_tried_again_and_a_new_request_anew() -> None:
    gate = gate_of(1, 0.4)
    for _ in range(6):
        settle(gate, 0, 1, 0)
    assert not opens(gate, [1])
    assert not opens(gate, [1], num_tokens=FORGETS)
    assert opens(gate, [1], num_tokens=3 * FORGETS)  # an eighth of the way from a half to nothing is left
    gate.start(0)
    assert opens(gate, [1])


def test_refuses_a_gain_that_cannot_be() -> None:
    for least_gain in (-0.1, 4.1):
        with pytest.raises(ValueError, match=r"expected least_gain in \[0, num_drafts = 4\], got"):
            SpeculativeConfig(num_drafts=4, least_gain=least_gain)
    with pytest.raises(ValueError, match=r"expected no least_gain with method 'draft_model', got 0\.5"):
        SpeculativeConfig(method="draft_model", least_gain=0.5)

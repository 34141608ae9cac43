"""Where a step leaves a state on its way: at the last length that a prompt of its tokens can hit."""

from __future__ import annotations

import pytest

from kvjax.core.kinds.inner_states import CheckpointRule

LENGTHS = range(41)


def rule(size: int, unit: int, **options: int | bool | None) -> CheckpointRule:
    given = {"hash_block_size": unit, "drops_unit": False, "num_lookahead": 0, "multiple": unit} | options
    return CheckpointRule(block_size=size, unit=unit, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("unit", [1, 2, 4])
def test_the_last_length_is_the_longest_that_leaves_a_token_and_has_a_hash(
    unit: int, lookahead: int, drops: bool
) -> None:
    """By trying all: a token is left to compute, and what the hash covers is there; EAGLE computes a unit again."""
    one = rule(8, unit, num_lookahead=lookahead, drops_unit=drops)
    for num_tokens in LENGTHS:
        if drops:
            fit = [n for n in range(0, num_tokens + 1, unit) if n + unit <= num_tokens]
        else:
            fit = [n for n in range(0, num_tokens + 1, unit) if n < num_tokens and n + lookahead <= num_tokens]
        assert one.last_length(num_tokens, unit) == max(fit, default=0)


@pytest.mark.parametrize(("size", "unit"), [(4, 2), (8, 2), (4, 4), (6, 3)])
def test_a_checkpoint_is_inside_its_step_in_a_column_between_the_first_and_the_last(size: int, unit: int) -> None:
    one, num_places = rule(size, unit), 0
    for start in LENGTHS:
        for end in range(start + 1, 41):
            place = one.place(start, end)
            before, running = (start - 1) // size, (end - 1) // size  # columns of the states before and after the step
            is_possible = start % unit == 0 and before < running - 1
            if place is None:
                assert not is_possible or one.last_length(end, unit) < start + unit
                continue
            assert is_possible
            num_places += 1
            assert start < place.num_tokens < end
            assert place.num_tokens == one.last_length(end, unit)
            assert before < place.column == running - 1
    assert num_places > 50


def test_devices_leave_states_at_multiples_from_the_start_and_some_none() -> None:
    assert rule(4, 2, multiple=None).place(0, 30) is None
    assert rule(4, 2, multiple=4).place(0, 30) == (28, 6)
    assert rule(4, 2, multiple=4).place(2, 30) is None
    assert rule(4, 2, multiple=2).place(2, 30) == (28, 6)

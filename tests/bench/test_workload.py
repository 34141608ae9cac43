"""Prompts of a workload: their sizes, what they share and what they do not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from kvjax.bench.workload import Workload

SIZES = {"batch": 5, "prompt_len": 40, "num_new_tokens": 4, "shared_len": 16}


@pytest.mark.parametrize("text", [(), range(7), range(1000), [5] * 100], ids=["no text", "short", "text", "repeating"])
def test_prompts_have_the_sizes_asked_for_and_share_what_they_should(text: Sequence[int]) -> None:
    workload = Workload.make(1000, text, **SIZES)
    for prompts in (workload.prompts, workload.sharing):
        assert [len(prompt) for prompt in prompts] == [40] * 5
        assert all(0 <= token < 1000 for prompt in prompts for token in prompt)
    assert len({prompt[0] for prompt in workload.prompts}) == 5
    assert len({tuple(prompt[:16]) for prompt in workload.sharing}) == 1
    assert len({prompt[16] for prompt in workload.sharing}) == 5
    assert Workload.make(1000, text, **SIZES) == workload


def test_text_goes_on_from_its_start() -> None:
    workload = Workload.make(1000, range(100), **SIZES)
    for prompt in workload.prompts:
        assert all((a + 1) % 100 == b for a, b in pairwise(prompt[1:]))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"batch": 0}, "expected batch of at least 1, got 0"),
        ({"prompt_len": 0}, "expected prompt_len of at least 1, got 0"),
        ({"num_new_tokens": 1}, "expected num_new_tokens of at least 2, got 1"),
        ({"shared_len": 40}, r"expected shared_len in \[0, 39\], got 40"),
        ({"shared_len": -1}, r"expected shared_len in \[0, 39\], got -1"),
    ],
)
def test_sizes_out_of_range_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload.make(1000, **{**SIZES, **sizes})

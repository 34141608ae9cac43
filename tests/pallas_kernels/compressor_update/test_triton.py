"""The compressor in Triton, interpreted, in steps of any cut against the whole sequence; NaN in pages given back."""

from __future__ import annotations

import functools

import jax
import pytest

from pallas_kernels.compressor_update import compressor_update
from tests.pallas_kernels.compressor_update.test_compressor_update import Steps


@pytest.mark.parametrize(
    ("ratio", "overlap", "page_size", "platform", "dim"),
    [
        (4, True, 4, "cpu", 5),  # DeepSeek V4, layers of ratio 4; numbers that fill no program
        (48, False, 16, "cpu", 128),  # as those of ratio 128: tokens in two loads, of which the last is not full
        pytest.param(1, True, 3, "cpu", 16, marks=pytest.mark.sweep),
        pytest.param(3, False, 1, "tpu", 5, marks=pytest.mark.sweep),
        pytest.param(20, True, 16, "tpu", 130, marks=pytest.mark.sweep),  # several programs of an entry
    ],
)
def test_entries_are_those_of_the_whole_sequence(
    ratio: int, overlap: bool, page_size: int, platform: str, dim: int
) -> None:
    """Whole prompts, chunks, one token at a time, rows without tokens, entry 0 that has none before it."""
    op = jax.jit(functools.partial(compressor_update, overlap=overlap, page_size=page_size, backend="triton"))
    for seed in range(2):
        steps = Steps(seed, ratio, overlap, page_size, platform, dim, op=op)
        steps.step([7, 1, 0])
        steps.run([1, 8, 12])

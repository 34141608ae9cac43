"""The Triton kernel of selective_scan, interpreted, against numpy's dual form of Mamba 2."""

from __future__ import annotations

import pytest

from pallas_kernels.ssm_update.triton_scan import Sizes
from tests.pallas_kernels.ssm_update.test_selective_scan import Shape
from tests.pallas_kernels.ssm_update.test_xla_scan import assert_random_steps


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        (Shape(head_dim=4, groups=1, num_tokens=40, dtype="bfloat16", state_dtype="bfloat16"), Sizes(tokens=16)),
        (Shape(head_dim=3, groups=2, num_tokens=40), Sizes(tokens=16)),
        (Shape(head_dim=3, groups=6, num_tokens=40, num_kept=4, limit=(0.1, 2.0)), Sizes()),
    ],
    ids=str,
)
def test_random_steps(shape: Shape, sizes: Sizes) -> None:
    """Decode, several tiles, mixed, drafts with pages of their own, lengths 0 and 1, no sequence."""
    assert_random_steps(shape, {"by_triton": sizes})

"""An op gives the oracle's answer compiled and not: outside `jit` its checks see values, inside they must not ask."""

from __future__ import annotations

import functools

import chex

from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.oracle import Options
from tests.pallas_kernels import cases
from tests.pallas_kernels.cases import assert_close

ROWS = [(1, 30), (1, 1), (11, 40), (6, 6)]
WINDOW = Options(sliding_window=9)
both_ways = chex.variants(with_jit=True, without_jit=True)


class TestWithAndWithoutJit(chex.TestCase):
    @both_ways
    def test_ragged_paged_attention(self) -> None:
        case = cases.make_case(0, cases.Shape(), ROWS, WINDOW)
        attend = functools.partial(
            ragged_paged_attention,
            sm_scale=WINDOW.sm_scale,
            sliding_window=WINDOW.sliding_window,
            num_kv_heads=case.shape.num_kv_heads,
            return_lse=True,
        )
        result = self.variant(attend)(*case.arrays)
        out, lse = case.expected(WINDOW)
        assert_close(result.out, out, "float32", "out")
        assert_close(result.lse, lse, "float32", "lse")

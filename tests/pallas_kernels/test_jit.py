"""An op gives the oracle's answer compiled and not: outside `jit` its checks see values, inside they must not ask."""

from __future__ import annotations

import functools

import chex
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.oracle import Options
from pallas_kernels.sparse_mla_attention import sparse_mla_attention
from tests.pallas_kernels import cases
from tests.pallas_kernels.cases import assert_close
from tests.pallas_kernels.sparse_mla_attention import sparse_cases

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

    @both_ways
    def test_sparse_mla_attention(self) -> None:
        shape = sparse_cases.Shape(ratio=4, topk=5)
        case = sparse_cases.make_case(0, shape, ROWS)
        attend = functools.partial(
            sparse_mla_attention,
            sm_scale=shape.sm_scale,
            sliding_window=shape.window,
            tokens_per_state=shape.ratio,
            page_size=shape.latent.page_size,
            compressed_page_size=shape.entry_page_size,
        )
        compressed = {"compressed_pages": tuple(map(jnp.asarray, case.compressed["compressed_pages"]))}
        result = self.variant(attend)(
            jnp.asarray(case.q), (jnp.asarray(case.page),), *case.step, **{**case.compressed, **compressed}
        )
        assert_close(result.out, case.expected(None)[0], "float32", "out")

"""An op gives the oracle's answer compiled and not: outside `jit` its checks see values, inside they must not ask."""

from __future__ import annotations

import functools

import chex
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_delta_rule import gated_delta_rule
from pallas_kernels.indexer_topk import indexer_topk
from pallas_kernels.kv_write import kv_write
from pallas_kernels.latent_entries import Plain
from pallas_kernels.merge_states import merge_states
from pallas_kernels.mla_paged_attention import mla_paged_attention
from pallas_kernels.page_ops import copy_pages, zero_pages
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.sparse_mla_attention import sparse_mla_attention
from pallas_kernels.ssm_update import causal_conv1d, selective_scan
from tests.pallas_kernels import cases
from tests.pallas_kernels.cases import assert_close, random_values
from tests.pallas_kernels.gated_delta_rule import delta_cases
from tests.pallas_kernels.indexer_topk.test_indexer_topk import DIM, check
from tests.pallas_kernels.latent_cases import LatentShape
from tests.pallas_kernels.mla_paged_attention import mla_cases
from tests.pallas_kernels.oracle import Options
from tests.pallas_kernels.sparse_mla_attention import sparse_cases
from tests.pallas_kernels.ssm_update.ssm_cases import ConvSizes, assert_conv
from tests.pallas_kernels.ssm_update.test_selective_scan import MAMBA2
from tests.pallas_kernels.state_cases import on_device

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
    def test_mla_paged_attention(self) -> None:
        case = mla_cases.make_case(0, mla_cases.Shape(), ROWS, WINDOW)
        attend = functools.partial(
            mla_paged_attention,
            sm_scale=WINDOW.sm_scale,
            sliding_window=WINDOW.sliding_window,
            page_size=case.shape.latent.page_size,
        )
        result = self.variant(attend)(*case.arrays)
        assert_close(result.out, case.expected(WINDOW)[0], "float32", "out")

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

    @both_ways
    def test_kv_write(self) -> None:
        rng = np.random.default_rng(0)
        k, v = (random_values(rng, (3, 2, 8), "float32") for _ in range(2))
        pages = tuple(jnp.zeros((4, 4, 2, 8)) for _ in range(2))
        got = self.variant(kv_write)(k, v, pages, jnp.array([13, -1, 4], jnp.int32))
        expected = tuple(np.zeros((16, 2, 8), np.float32) for _ in range(2))
        for array, new in zip(expected, (k, v), strict=True):
            array[[13, 4]] = new[[0, 2]]
        chex.assert_trees_all_equal(got, tuple(array.reshape(4, 4, 2, 8) for array in expected), strict=True)

    @both_ways
    def test_page_ops(self) -> None:
        pages = random_values(np.random.default_rng(0), (6, 2, 4), "float32")
        got = self.variant(lambda pages, ids: (copy_pages(pages, ids[:2], ids[2:]), zero_pages(pages, ids[2:])))(
            jnp.asarray(pages), jnp.array([3, 5, 2, -1], jnp.int32)
        )
        copied, zeroed = pages.copy(), pages.copy()
        copied[2], zeroed[2] = pages[3], 0
        chex.assert_trees_all_equal(got, (copied, zeroed), strict=True)

    @both_ways
    def test_merge_states(self) -> None:
        """Parts whose keys weigh 3 to 1."""
        outs = random_values(np.random.default_rng(0), (2, 5, 3, 8), "float32")
        lses = np.log(np.array([3.0, 1.0], np.float32))[:, None, None] * np.ones((2, 5, 3), np.float32)
        result = self.variant(functools.partial(merge_states, return_lse=True))(outs, lses)
        assert_close(result.out, (3 * outs[0] + outs[1]) / 4, "float32", "out")
        assert_close(result.lse, np.full((5, 3), np.log(4.0)), "float32", "lse")

    @both_ways
    def test_causal_conv1d(self) -> None:
        inputs = ConvSizes(24, 5, 12, 8).make(np.random.default_rng(0), [1, 0, 9, 7], 4, "float32", has_bias=True)
        x, states, weight, bias, step = inputs
        convolve = self.variant(functools.partial(causal_conv1d, activation="silu"))
        result = convolve(jnp.asarray(x), jnp.asarray(states), weight, *on_device(step), bias=bias)
        assert_conv(result, inputs, "float32", "silu")

    @both_ways
    def test_selective_scan(self) -> None:
        arrays, step = MAMBA2.make(np.random.default_rng(0), [1, 0, 9, 7], 5, 12)
        given = (jnp.asarray(arrays[name]) for name in ("x", "states", "dt", "a", "b", "c"))
        options = {name: jnp.asarray(arrays[name]) for name in ("d", "dt_bias")}
        MAMBA2.assert_right(self.variant(selective_scan)(*given, *on_device(step), **options), arrays, step)

    @both_ways
    def test_gated_delta_rule(self) -> None:
        shape = delta_cases.Shape(num_tokens=24)
        arrays, step = shape.make(np.random.default_rng(0), [1, 0, 9, 7])
        given = (jnp.asarray(arrays[name]) for name in (*delta_cases.INPUTS, "states"))
        apply = functools.partial(gated_delta_rule, scale=shape.scale, use_qk_l2norm=shape.use_qk_l2norm)
        shape.assert_right(self.variant(apply)(*given, *map(jnp.asarray, step)), arrays, step)

    @both_ways
    def test_indexer_topk(self) -> None:
        sizes = ("topk", "tokens_per_state", "entries", "page_size")
        choose = self.variant(indexer_topk, static_argnames=sizes)
        check(0, LatentShape(DIM, 4), Plain(), 2, 7, ROWS, op=choose)

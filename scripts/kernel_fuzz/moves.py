"""Trials of ops that move what stands in pages: kv_write, latent_write, page_ops; and of merge_states.

Oracles: a token or a page at a time in numpy, numbers rounded from float64; merging: attention over all keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import chex
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.kv_write import kv_write
from pallas_kernels.latent_write import latent_write
from pallas_kernels.layouts import attention_layout
from pallas_kernels.merge_states import merge_states
from scripts.kernel_fuzz.trials import checked, compiled_on, one_of
from tests.pallas_kernels.cases import as_bytes, assert_close, random_values, whole_rows
from tests.pallas_kernels.latent_cases import LatentShape, random_pages, unpacked
from tests.pallas_kernels.merge_states.test_merge_states import HEADS, attend, random_parts
from tests.pallas_kernels.oracle import LARGEST_SINK, by_token
from tests.pallas_kernels.page_ops import sweep as page_sweep
from tests.pallas_kernels.page_ops.test_page_ops import all_four, expected

_STEPS = 4
_DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")


def rounded(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float64 numbers as pages hold them: the nearest, beyond the range of 8 bits the largest; NaN in int8 is 0."""
    if dtype == np.int8:
        return np.clip(np.rint(np.nan_to_num(x, nan=0.0, posinf=127, neginf=-128)), -128, 127).astype(np.int8)
    if dtype.itemsize == 1:
        limit = float(ml_dtypes.finfo(dtype).max)
        x = np.where(np.isnan(x), x, np.clip(x, -limit, limit))
    return x.astype(np.float32).astype(dtype)


def _slots(rng: np.random.Generator, count: int, num_slots: int) -> np.ndarray:
    """Different slots, page 0's too, in runs or in any order, some skipped."""
    order = (
        rng.permutation(num_slots) if rng.integers(2) else np.roll(np.arange(num_slots), int(rng.integers(num_slots)))
    )
    slots = np.append(order[:count], np.full(max(0, count - num_slots), -1))
    slots[rng.random(count) < one_of(rng, [0.0, 0.1, 0.5, 1.0])] = -1
    return slots.astype(np.int32)


def _values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Normal numbers, with some beyond every range, and what is not finite."""
    x = random_values(rng, shape, dtype)
    flat = x.reshape(-1)
    places = rng.integers(0, flat.size, 6)
    flat[places] = np.array([np.nan, np.inf, -np.inf, 1e9, -1e9, 0.5]).astype(x.dtype)
    return x


def kv(rng: np.random.Generator, platform: str) -> Iterator[str]:
    """Bit for bit; scales are powers of two, so that quotients are exact."""
    dtype, page_size = one_of(rng, _DTYPES), one_of(rng, [1, 5, 8, 16, 64])
    heads, dim = one_of(rng, [1, 2, 3, 8]), one_of(rng, [64, 80, 128, 192])
    tokens, num_pages = one_of(rng, [1, 7, 70]), one_of(rng, [2, 9])
    new_dtype = one_of(rng, ["bfloat16", "float32"])
    layout = "tpu" if platform == "tpu" or rng.random() < 0.5 else "cpu"
    page_size = whole_rows(page_size, heads, dtype, layout)
    arrays = attention_layout(
        num_kv_heads=heads, head_dim=dim, page_size=page_size, dtype=dtype, platform=layout
    ).arrays
    size = one_of(rng, [None, (), (heads,)])
    scales = [None if size is None else (2.0 ** rng.integers(-3, 4, size)).astype(np.float32) for _ in range(2)]

    def write(k: Any, v: Any, pages: Any, slots: Any) -> Any:
        given = [None if x is None else jnp.asarray(x) for x in scales]
        return kv_write(k, v, pages, slots, k_scale=given[0], v_scale=given[1], backend=platform)

    run = None
    for _ in range(_STEPS):
        pages = tuple(random_values(rng, array.shape(num_pages), dtype) for array in arrays)
        for array in pages:
            array[1:] = np.array(127 if dtype == "int8" else np.nan).astype(array.dtype)
        new = [_values(rng, (tokens, heads, dim), new_dtype) for _ in range(2)]
        slots = _slots(rng, tokens, num_pages * page_size)
        given = (*map(jnp.asarray, new), tuple(map(jnp.asarray, pages)), jnp.asarray(slots))
        run = run or compiled_on(platform, rng, write, *given)

        def check(run: Any = run, new: Any = new, pages: Any = pages, slots: Any = slots, given: Any = given) -> None:
            want = tuple(array.copy() for array in pages)
            for t in np.flatnonzero(slots >= page_size):
                page, slot = divmod(int(slots[t]), page_size)
                rows = [
                    rounded(x[t].astype(np.float64) / (1.0 if s is None else np.reshape(s, (-1, 1))), want[0].dtype)
                    for x, s in zip(new, scales, strict=True)
                ]
                if len(want) == 2:
                    want[0][page, slot], want[1][page, slot] = rows
                    continue
                token = by_token(want[0], heads)[page, slot]
                token[:] = np.zeros((), token.dtype)
                token[0 : 2 * heads : 2, :dim], token[1 : 2 * heads : 2, :dim] = rows
            assert_same(run(*given), want)

        yield checked(
            (dtype, page_size, heads, dim, tokens, num_pages, new_dtype, layout, scales, slots.tolist()), check
        )


def assert_same(got: Any, want: Any) -> None:
    """Bit for bit, but any NaN for another."""
    for x, y in zip(got, want, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype
        is_nan = np.isnan(y.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(x.astype(np.float32)), is_nan)
        same = x.view(f"u{x.itemsize}") == y.view(f"u{y.itemsize}")
        assert (same | is_nan).all(), f"{int((~same & ~is_nan).sum())} numbers differ"


def latent(rng: np.random.Generator, platform: str) -> Iterator[str]:
    """States land in their slots, nothing else changes."""
    dtype, page_size = one_of(rng, _DTYPES), one_of(rng, [1, 5, 6, 8, 16, 64])
    dim, count, num_pages = one_of(rng, [24, 128, 200]), one_of(rng, [1, 9, 50]), 9
    layout = "tpu" if platform == "tpu" or rng.random() < 0.5 else "cpu"
    shape = LatentShape(dim, page_size, dtype, layout)
    scale = one_of(rng, [None, 2.0, 0.25])

    def write(states: Any, pages: Any, slots: Any) -> Any:
        given = None if scale is None else jnp.float32(scale)
        return latent_write(states, pages, slots, scale=given, page_size=page_size, backend=platform)

    run = None
    for _ in range(_STEPS):
        page = random_pages(rng, shape, np.ones((num_pages, page_size), bool))
        states = _values(rng, (count, dim), "float32")
        slots = _slots(rng, count, num_pages * page_size)
        given = (jnp.asarray(states), (jnp.asarray(page),), jnp.asarray(slots))
        run = run or compiled_on(platform, rng, write, *given)

        def check(
            run: Any = run, page: Any = page, states: Any = states, slots: Any = slots, given: Any = given
        ) -> None:
            want = unpacked(page, shape)
            for t in np.flatnonzero(slots >= page_size):
                value = rounded(states[t].astype(np.float64) / (scale or 1.0), page.dtype)
                want[slots[t] // page_size, slots[t] % page_size] = value.astype(np.float64)
            np.testing.assert_array_equal(unpacked(np.asarray(run(*given)[0]), shape), want)

        yield checked((shape, count, scale, slots.tolist()), check)


def pages(rng: np.random.Generator, platform: str) -> Iterator[str]:
    """Pages copied, zeroed, gathered and scattered bit for bit, whatever stands in page 0."""
    choice = {name: one_of(rng, levels) for name, levels in page_sweep.FACTORS.items()}
    run = None
    for _ in range(_STEPS):
        array = random_values(rng, (choice["num_pages"], *choice["page_shape"]), choice["dtype"])
        ids = page_sweep.random_ids(rng, choice["num_pages"], choice["count"])
        values = random_values(rng, (choice["count"], *choice["page_shape"]), choice["dtype"])
        arguments = [jnp.asarray(x) for x in (array, *ids, values)]
        run = run or compiled_on(platform, rng, all_four(platform), *arguments)

        def check(
            run: Any = run, array: Any = array, ids: Any = ids, values: Any = values, given: Any = arguments
        ) -> None:
            want = expected(array, *ids, values)
            chex.assert_trees_all_equal(as_bytes(run(*given)), as_bytes(want), strict=True)

        yield checked((choice, ids), check)


def merge(rng: np.random.Generator, platform: str) -> Iterator[str]:
    """Parts merged are attention over all keys; what a part holds where it saw nothing changes nothing."""
    sizes = one_of(rng, [[1], [0, 0], [4, 1], [3, 0, 9], [2] * 7, [30, 1]])
    dtype = one_of(rng, ["float32", "bfloat16"])
    sinks = one_of(rng, [None, [3.0, -np.inf, 90.0], [-np.inf] * HEADS, [-1e30, 0.0, 50.0], [np.inf, 1e4, -1e4]])

    def call(outs: Any, lses: Any) -> Any:
        given = None if sinks is None else jnp.asarray(sinks, jnp.float32)
        return merge_states(outs, lses, sinks=given, return_lse=True, backend=platform)[:2]

    run = None
    for _ in range(_STEPS):
        seed = int(rng.integers(1 << 30))
        logits, values = random_parts(seed, sizes)
        parts = [attend(*part) for part in zip(logits, values, strict=True)]
        outs, lses = (np.stack([part[i] for part in parts]).astype(np.float32) for i in range(2))
        outs[lses == -np.inf] = np.nan
        given = (jnp.asarray(outs, dtype), jnp.asarray(lses))
        run = run or compiled_on(platform, rng, call, *given)

        def check(run: Any = run, given: Any = given, logits: Any = logits, values: Any = values) -> None:
            capped = None if sinks is None else np.minimum(np.array(sinks), LARGEST_SINK)
            whole = attend(np.concatenate(logits, axis=2), np.concatenate(values), capped)
            result = run(*given)
            for head in range(HEADS):
                assert_close(result[0][:, head], whole[0][:, head], dtype, "out")
                assert_close(result[1][:, head], whole[1][:, head], "float32", "lse")

        yield checked((sizes, dtype, sinks, seed), check)

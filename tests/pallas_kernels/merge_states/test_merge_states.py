"""Laws of merge_states: attention over parts, merged, is attention over all keys."""

from __future__ import annotations

from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.merge_states import merge_states
from tests.pallas_kernels.cases import assert_close

T, HEADS, DIM = 5, 3, 8


def attend(logits: np.ndarray, values: np.ndarray, sinks: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) in float64 of float64 `logits` [T, H, K] over `values` [K, H, D]; rows without a key: 0 and -inf."""
    out, lse = np.zeros((*logits.shape[:2], values.shape[-1])), np.full(logits.shape[:2], -np.inf)
    for t, h in np.ndindex(*logits.shape[:2]):
        if np.isfinite(logits[t, h]).any():
            row = logits[t, h] if sinks is None else np.append(logits[t, h], sinks[h])
            lse[t, h] = row.max() + np.log(np.exp(row - row.max()).sum())
            out[t, h] = np.exp(logits[t, h] - lse[t, h]) @ values[:, h]
    return out, lse


def random_parts(seed: int, sizes: list[int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Logits and values of parts of `sizes` keys; some rows of every part see none, the first row sees none at all."""
    rng = np.random.default_rng(seed)
    logits = [rng.standard_normal((T, HEADS, n)) * 4 + rng.normal() * 30 for n in sizes]
    for part in logits:
        part[rng.random((T, HEADS)) < 0.3] = -np.inf
        part[0] = -np.inf
    return logits, [rng.standard_normal((n, HEADS, DIM)) for n in sizes]


@pytest.mark.parametrize("sinks", [None, [3.0, -np.inf, 90.0]], ids=["plain", "sinks"])
@pytest.mark.parametrize("sizes", [[4], [6, 1], [3, 0, 9], [2] * 7], ids=str)
def test_parts_merge_to_the_whole(sizes: list[int], sinks: list[float] | None) -> None:
    logits, values = random_parts(len(sizes), sizes)
    parts = [attend(*part) for part in zip(logits, values, strict=True)]
    outs, lses = (np.stack([part[i] for part in parts]).astype(np.float32) for i in range(2))
    outs[lses == -np.inf] = np.nan  # nobody looks at what a part that saw nothing wrote
    given = None if sinks is None else np.array(sinks)
    whole = attend(np.concatenate(logits, axis=2), np.concatenate(values), given)
    result = merge_states(outs, lses, sinks=None if given is None else jnp.float32(given), return_lse=True)
    assert_close(result.out, whole[0], "float32", "out")
    assert_close(result.lse, whole[1], "float32", "lse")
    assert result.pages == ()


def test_the_order_of_merging_changes_nothing() -> None:
    """Merging two parts and then a third, stacked or not, is merging the three."""
    outs = np.random.default_rng(0).standard_normal((3, T, HEADS, DIM)).astype(np.float32)
    lses = np.random.default_rng(1).standard_normal((3, T, HEADS)).astype(np.float32)
    first = merge_states(outs[:2], lses[:2], return_lse=True)
    nested = merge_states([first.out, outs[2]], [first.lse, lses[2]], return_lse=True)
    flat = merge_states(list(outs), list(lses), return_lse=True)
    assert_close(nested.out, flat.out, "float32", "out")
    assert_close(nested.lse, flat.lse, "float32", "lse")


def test_dtype_of_the_parts_is_kept() -> None:
    outs = jnp.ones((2, T, HEADS, DIM), jnp.bfloat16)
    result = merge_states(outs, jnp.zeros((2, T, HEADS)))
    assert result.out.dtype == jnp.bfloat16
    assert result.lse is None
    np.testing.assert_array_equal(result.out, outs[0])


GOOD: dict[str, Any] = {"outs": np.zeros((2, T, HEADS, DIM), np.float32), "lses": np.zeros((2, T, HEADS), np.float32)}
BAD = {
    "backend": ({"backend": "cuda"}, "merge_states: expected backend out of .*, got 'cuda'"),
    "parts": ({"lses": GOOD["lses"][:1]}, r"expected lses .* of shape \(2, 5, 3\), got \(1, 5, 3\)"),
    "none": ({"outs": []}, "expected at least one part, got no outs"),
    "empty": ({"outs": GOOD["outs"][:0]}, r"expected at least one part, got outs of shape \(0, 5, 3, 8\)"),
    "rank": ({"outs": GOOD["outs"][0]}, r"expected outs \[num_parts, num_tokens, .* of shape .* got \(5, 3, 8\)"),
    "shape": (
        {"outs": [GOOD["outs"][0], GOOD["outs"][0, 1:]]},
        r"expected outs of one shape and dtype, got \[\(\(5, 3, 8\), 'float32'\), \(\(4, 3, 8\), 'float32'\)\]",
    ),
    "lse_shape": ({"lses": GOOD["lses"][:, 1:]}, r"expected lses .* of shape \(2, 5, 3\), got \(2, 4, 3\)"),
    "dtype": ({"outs": np.zeros(GOOD["outs"].shape, np.int32)}, "expected outs of dtype float32, .* got int32"),
    "dtypes": ({"lses": [GOOD["lses"][0], jnp.zeros((T, HEADS), jnp.bfloat16)]}, "lses of one shape and dtype, got"),
    "lse_dtype": ({"lses": jnp.zeros((2, T, HEADS), jnp.bfloat16)}, "expected lses of dtype float32, got bfloat16"),
    "sinks": ({"sinks": np.zeros(2, np.float32)}, r"expected sinks \[num_q_heads\] of shape \(3\), got \(2,\)"),
    "sinks_dtype": ({"sinks": np.zeros(3, np.int32)}, "expected sinks of dtype float32, bfloat16 .* got int32"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    change, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        merge_states(**{**GOOD, **change})


def test_backends() -> None:
    """XLA's fusion is the kernel."""
    for backend in ("tpu", "gpu"):
        chex.assert_trees_all_equal(merge_states(**GOOD, backend=backend), merge_states(**GOOD), strict=True)

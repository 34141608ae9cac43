"""Softmax in parts: however keys are split and merged, the result is that of all keys at once."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import online_softmax
from pallas_kernels.online_softmax import SoftmaxState

NUM_ROWS, KEYS, DIM = 5, 12, 4


@pytest.mark.parametrize("seed", range(5))
def test_parts_merge_in_any_order_to_all_keys_at_once(seed: int) -> None:
    """Rows of a part may repeat; parts of no row are left out; rows without a part have seen nothing."""
    random = np.random.default_rng(seed)
    q, k, v = (random.standard_normal((NUM_ROWS, n, DIM)).astype(np.float32) for n in (2, KEYS, KEYS))
    visible = random.random((NUM_ROWS, 2, KEYS)) < 0.7
    visible[-1] = False
    rows = np.concatenate([np.repeat(np.arange(NUM_ROWS - 1), 3), [NUM_ROWS, np.iinfo(np.int32).max]])
    keys = np.concatenate([np.tile(np.arange(KEYS).reshape(3, -1), (NUM_ROWS - 1, 1)), [[0] * 4, [1] * 4]])
    order = random.permutation(rows.size)
    state = online_softmax.empty((NUM_ROWS, 2), DIM)
    for chosen in np.array_split(order, 3):
        row, key = np.minimum(rows[chosen], NUM_ROWS - 1), keys[chosen]
        at = row[:, None]
        seen = visible[at[..., None], np.arange(2)[:, None], key[:, None]]
        seen |= (rows[chosen] >= NUM_ROWS)[:, None, None]  # what is left out would be noticed
        empty = online_softmax.empty((row.size, 2), DIM)
        part = online_softmax.attend(empty, q[row], k[at, key], v[at, key], jnp.asarray(seen), None)
        state = online_softmax.merge_rows(state, jnp.asarray(rows[chosen], jnp.int32), part)
    out, lse = online_softmax.finish(state, None)

    scores = np.where(visible, np.einsum("rqd,rkd->rqk", q.astype(np.float64), k), -np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        expected_lse = np.log(np.exp(scores).sum(-1))
        expected = np.einsum("rqk,rkd->rqd", np.exp(scores - expected_lse[..., None]), v)
    nothing = ~visible.any(-1)
    np.testing.assert_allclose(out, np.where(nothing[..., None], 0.0, expected), atol=2e-6)
    np.testing.assert_allclose(lse, np.where(nothing, -np.inf, expected_lse), atol=2e-6)


def test_a_part_of_nan_stays_in_its_row() -> None:
    state = online_softmax.empty((3,), DIM)
    part = SoftmaxState(jnp.zeros(2), jnp.array([1.0, jnp.nan]), jnp.ones((2, DIM)))
    out, _ = online_softmax.finish(online_softmax.merge_rows(state, jnp.array([0, 2]), part), None)
    assert np.isfinite(out[:2]).all()
    assert np.isnan(out[2]).all()

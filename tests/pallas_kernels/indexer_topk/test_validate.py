"""Every argument that does not fit is named, with what was expected and what came."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.indexer_topk import indexer_topk
from pallas_kernels.latent_entries import IndexFp8


def ints(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


GOOD: dict[str, Any] = {
    "q": jnp.zeros((6, 3, 8)),
    "weights": jnp.zeros((6, 3)),
    "pages": (jnp.zeros((5, 4, 8)),),
    "block_tables": jnp.zeros((3, 2), jnp.int32),
    "seq_lens": ints(3, 8, 0),
    "query_start_loc": ints(0, 1, 4, 4),
    "distribution": ints(1, 1, 2),
    "topk": 2,
    "tokens_per_state": 2,
}
BAD = {
    "backend": ({"backend": "x"}, "indexer_topk: expected backend out of .*, got 'x'"),
    "q_rank": ({"q": jnp.zeros((6, 24))}, r"expected q \[num_tokens, num_heads, dim\] .* got \(6, 24\)"),
    "q_dtype": ({"q": jnp.zeros((6, 3, 8), jnp.int32)}, "expected q of dtype float32, .* got int32"),
    "q_empty": ({"q": jnp.zeros((6, 0, 8))}, r"at least one token, head and number, got q of shape \(6, 0, 8\)"),
    "weights": ({"weights": jnp.zeros((6, 2))}, r"expected weights \[num_tokens, num_heads\] as q .* got \(6, 2\)"),
    "weights_dtype": ({"weights": jnp.zeros((6, 3), jnp.int8)}, "expected weights of dtype float32, .* got int8"),
    "topk": ({"topk": 0}, "expected topk to be an integer >= 1, got 0"),
    "ratio": ({"tokens_per_state": 0}, "expected tokens_per_state to be an integer >= 1, got 0"),
    "pages": ({"pages": (jnp.zeros((5, 4, 12)),)}, r"expected pages\[0\] .*8.* got \(5, 4, 12\)"),
    "entries": (
        {"entries": IndexFp8(), "pages": (jnp.zeros((5, 4, 12)),)},
        r"expected pages of dtype int8 for entries IndexFp8\(\), got float32",
    ),
    "lens": ({"seq_lens": ints(3, 17, 0)}, r"expected seq_lens from the query lengths \[1 3\] to 16, got \[ ?3 17\]"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    change, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        indexer_topk(**{**GOOD, **change})


def test_a_platform_without_a_kernel() -> None:
    with pytest.raises(NotImplementedError, match="indexer_topk: there is no gpu kernel"):
        indexer_topk(**GOOD, backend="gpu")


def test_good_arguments() -> None:
    assert indexer_topk(**GOOD).shape == (6, 2)

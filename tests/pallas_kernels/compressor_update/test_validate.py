"""Every argument that does not fit is named, with what was expected and what came."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.compressor_update import compressor_update


def ints(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


GOOD: dict[str, Any] = {
    "kv": jnp.zeros((6, 8)),
    "scores": jnp.zeros((6, 8)),
    "pages": (jnp.zeros((5, 4, 16)),),
    "block_tables": jnp.zeros((3, 2), jnp.int32),
    "seq_lens": ints(3, 8, 0),
    "query_start_loc": ints(0, 1, 4, 4),
    "distribution": ints(1, 1, 2),
    "slot_mapping": ints(4, 8, 9, 10, -1, -1),
    "position_bias": jnp.zeros((2, 8)),
    "overlap": True,
}
ODD = {"kv": jnp.zeros((6, 7)), "scores": jnp.zeros((6, 7)), "position_bias": jnp.zeros((2, 7))}
BAD = {
    "backend": ({"backend": "x"}, "compressor_update: expected backend out of .*, got 'x'"),
    "overlap": ({"overlap": 1}, "compressor_update: expected overlap to be True or False, got 1"),
    "rank": ({"kv": jnp.zeros(8)}, r"expected kv \[num_tokens, coff \* dim\] .* got \(8,\)"),
    "odd": (ODD, r"expected kv of tokens and of an even width with overlap, got \(6, 7\)"),
    "empty": ({"kv": jnp.zeros((0, 8))}, r"expected kv of tokens .* got \(0, 8\)"),
    "dtype": ({"kv": jnp.zeros((6, 8), jnp.int8)}, "expected kv of dtype float32, .* got int8"),
    "scores": ({"scores": jnp.zeros((6, 4))}, r"expected scores .* of shape \(6, 8\), got \(6, 4\)"),
    "scores_dtype": ({"scores": jnp.zeros((6, 8), jnp.int8)}, "expected scores of dtype float32, .* got int8"),
    "bias": ({"position_bias": jnp.zeros((2, 4))}, r"expected position_bias .* of shape \(any, 8\), got \(2, 4\)"),
    "bias_dtype": ({"position_bias": jnp.zeros((2, 8), jnp.int8)}, "expected position_bias of dtype float32, .* int8"),
    "ratio": ({"position_bias": jnp.zeros((0, 8))}, "the rows of position_bias, to be an integer >= 1, got 0"),
    "pages": ({"pages": (jnp.zeros((5, 4, 8)),)}, r"expected pages\[0\] .*16.* got \(5, 4, 8\)"),
    "pages_dtype": ({"pages": (jnp.zeros((5, 4, 16), "bfloat16"),)}, "pages of dtype float32, got bfloat16"),
    "lens": ({"seq_lens": ints(3, 9, 0)}, r"expected seq_lens from the query lengths \[1 3\] to 8, got \[3 9\]"),
    "slots_shape": ({"slot_mapping": ints(4)}, r"expected slot_mapping .* got \(1,\)"),
    "slots_dtype": ({"slot_mapping": jnp.zeros(6)}, "expected slot_mapping of dtype int32, got float32"),
    "slots": ({"slot_mapping": ints(4, 8, 9, 8, -1, -1)}, "expected one token per slot, got two for slot 8"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    change, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        compressor_update(**{**GOOD, **change})


def test_a_platform_without_a_kernel() -> None:
    with pytest.raises(NotImplementedError, match="compressor_update: there is no gpu kernel"):
        compressor_update(**GOOD, backend="gpu")


def test_good_arguments() -> None:
    output = compressor_update(**GOOD)
    assert (output.entries.shape, output.positions.tolist()) == ((6, 4), [4, 6, -1, -1, -1, -1])

"""Every argument that does not fit is named, with what was expected and what came."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import ragged_paged_attention

SPLIT = (jnp.zeros((5, 4, 2, 8)), jnp.zeros((5, 4, 2, 8)))
PACKED_FP8 = (jnp.zeros((5, 4, 1, 4, 128), jnp.float8_e4m3fn),)
NEW_KV = (jnp.zeros((6, 2, 8)), jnp.zeros((6, 2, 8)))
SLOTS = jnp.full(6, -1, jnp.int32)


def ints(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


GOOD: dict[str, Any] = {
    "q": jnp.zeros((6, 4, 8)),
    "pages": SPLIT,
    "block_tables": jnp.zeros((3, 2), jnp.int32),
    "seq_lens": ints(3, 8, 0),
    "query_start_loc": ints(0, 1, 4, 4),
    "distribution": ints(1, 1, 2),
    "sm_scale": 0.5,
}
BAD = {
    "backend": ({"backend": "mosaic"}, r"ragged_paged_attention: expected backend out of .*, got 'mosaic'"),
    "causal": ({"causal": 1}, "expected causal to be True or False, got 1"),
    "window": ({"sliding_window": 0}, "expected sliding_window to be an integer >= 1, got 0"),
    "window_type": ({"sliding_window": 4.0}, "expected sliding_window to be an integer >= 1, got 4.0"),
    "chunk": ({"attention_chunk_size": -3}, "expected attention_chunk_size to be an integer >= 1, got -3"),
    "chunk_bool": ({"attention_chunk_size": True}, "expected attention_chunk_size to be an integer >= 1, got True"),
    "sink_tokens": ({"num_sink_tokens": -1}, "expected num_sink_tokens to be an integer >= 0, got -1"),
    "scale": ({"sm_scale": float("nan")}, "expected sm_scale to be a finite number, got nan"),
    "scale_type": ({"sm_scale": "1"}, "expected sm_scale to be a finite number, got '1'"),
    "soft_cap": ({"soft_cap": 0.0}, "expected soft_cap to be None or a finite number > 0, got 0.0"),
    "soft_cap_inf": ({"soft_cap": np.inf}, "expected soft_cap to be None or a finite number > 0, got inf"),
    "schedule": ({"schedule": (), "backend": "reference"}, "expected schedule None or DecodeStep"),
    "no_slots": ({"new_kv": NEW_KV}, "expected slot_mapping along with new_kv, got None; pass both or neither"),
    "no_kv": ({"slot_mapping": SLOTS}, "expected new_kv along with slot_mapping, got None; pass both or neither"),
    "kv_type": ({"new_kv": NEW_KV[0], "slot_mapping": SLOTS}, r"expected new_kv to be a pair \(k, v\), got ArrayImpl"),
    "kv_tokens": (
        {"new_kv": (NEW_KV[0][:5], NEW_KV[1]), "slot_mapping": SLOTS},
        r"expected new_kv\[0\] .* of shape \(6, any, any\), got \(5, 2, 8\)",
    ),
    "q_rank": (
        {"q": jnp.zeros((6, 32))},
        r"expected q \[num_tokens, num_q_heads, head_dim\] of shape .* got \(6, 32\)",
    ),
    "q_dtype": ({"q": jnp.zeros((6, 4, 8), jnp.int32)}, "expected q of dtype float32, bfloat16 or float16, got int32"),
    "q_dim": ({"q": jnp.zeros((6, 4, 16))}, "expected q's head_dim as the K pages' 8, got 16"),
    "q_heads": ({"q": jnp.zeros((6, 5, 8))}, "expected a multiple of 2 KV heads as query heads, got 5"),
    "q_empty": ({"q": jnp.zeros((0, 4, 8))}, r"expected at least one query token, got q of shape \(0, 4, 8\); pad"),
    "pages": ({"pages": ()}, "expected pages to be a tuple .*, got 0 arrays"),
    "heads": ({"num_kv_heads": 4}, "expected num_kv_heads 2 as the pages have, got 4"),
    "heads_low": ({"num_kv_heads": 0}, "expected num_kv_heads to be an integer >= 1, got 0"),
    "heads_open": (
        {"pages": PACKED_FP8},
        r"expected num_kv_heads out of \[1, 2\] for 1 rows of packing 4 and head_dim 8, got None; state it",
    ),
    "heads_packed": ({"pages": PACKED_FP8, "num_kv_heads": 3}, r"expected num_kv_heads out of \[1, 2\] .* got 3"),
    "tables_rank": ({"block_tables": ints(0, 0)}, r"expected block_tables \[num_seqs, pages_per_seq\] .* got \(2,\)"),
    "tables_empty": ({"block_tables": jnp.zeros((3, 0), jnp.int32)}, r"at least one row and column, .* \(3, 0\)"),
    "tables_dtype": ({"block_tables": jnp.zeros((3, 2))}, "expected block_tables of dtype int32, got float32"),
    "lens_shape": ({"seq_lens": ints(3, 8)}, r"expected seq_lens \[num_seqs\] of shape \(3\), got \(2,\)"),
    "starts_shape": ({"query_start_loc": ints(0, 1, 4)}, r"expected query_start_loc .* of shape \(4\), got \(3,\)"),
    "distribution_shape": ({"distribution": ints(1, 2)}, r"expected distribution \[3\] of shape \(3\), got \(2,\)"),
    "lens_dtype": ({"seq_lens": jnp.array([3.0, 8.0, 0.0])}, "expected seq_lens of dtype int32, got float32"),
    "distribution": (
        {"distribution": ints(1, 0, 2)},
        r"expected distribution to rise within \[0, 3\], got \[1, 0, 2\]",
    ),
    "distribution_far": ({"distribution": ints(1, 1, 4)}, r"to rise within \[0, 3\], got \[1, 1, 4\]"),
    "starts_first": ({"query_start_loc": ints(1, 1, 4, 4)}, "expected query_start_loc to rise from 0 to at most 6"),
    "starts_fall": ({"query_start_loc": ints(0, 2, 1, 4)}, "expected query_start_loc to rise from 0 to at most 6"),
    "starts_far": ({"query_start_loc": ints(0, 1, 7, 7)}, "expected query_start_loc to rise from 0 to at most 6"),
    "decode": ({"query_start_loc": ints(0, 2, 4, 4)}, r"expected one query token per decode sequence, got \[2\]"),
    "lens_short": ({"seq_lens": ints(3, 2, 0)}, r"expected seq_lens from the query lengths \[1 3\] to 8, got \[3 2\]"),
    "lens_long": ({"seq_lens": ints(3, 9, 0)}, r"expected seq_lens from the query lengths \[1 3\] to 8, got \[3 9\]"),
    "sinks": ({"sinks": jnp.zeros(2)}, r"expected sinks \[num_q_heads\] of shape \(4\), got \(2,\)"),
    "sinks_dtype": ({"sinks": ints(0, 0, 0, 0)}, "expected sinks of dtype float32, bfloat16 or float16, got int32"),
    "k_scale": ({"k_scale": jnp.ones(4)}, r"expected k_scale of shape \(\) or \(2,\), got \(4,\)"),
    "v_scale": ({"v_scale": jnp.ones(1)}, r"expected v_scale of shape \(\) or \(2,\), got \(1,\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    change, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        ragged_paged_attention(**{**GOOD, **change})


def test_good_arguments() -> None:
    """The base of the cases above is itself accepted; `new_kv` states the heads that packing leaves open."""
    result = ragged_paged_attention(**GOOD)
    assert result.lse is None
    assert result.out.shape == (6, 4, 8)
    packed = {**GOOD, "pages": PACKED_FP8, "new_kv": NEW_KV, "slot_mapping": SLOTS}
    assert ragged_paged_attention(**packed, return_lse=True).lse.shape == (6, 4)

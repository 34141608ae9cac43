"""Every argument that does not fit is named, with what was expected and what came."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.mla_paged_attention import mla_paged_attention


def ints(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


PAGES = (jnp.zeros((5, 4, 24)),)
PACKED = (jnp.zeros((5, 1, 1, 4, 128), jnp.int8),)
NEW_KV = (jnp.zeros((6, 16)), jnp.zeros((6, 8)))
SLOTS = jnp.full(6, -1, jnp.int32)
GOOD: dict[str, Any] = {
    "q_nope": jnp.zeros((6, 3, 16)),
    "q_pe": jnp.zeros((6, 3, 8)),
    "pages": PAGES,
    "block_tables": jnp.zeros((3, 2), jnp.int32),
    "seq_lens": ints(3, 8, 0),
    "query_start_loc": ints(0, 1, 4, 4),
    "distribution": ints(1, 1, 2),
    "sm_scale": 0.5,
}
BAD = {
    "backend": ({"backend": "mosaic"}, "mla_paged_attention: expected backend out of .*, got 'mosaic'"),
    "window": ({"sliding_window": 0}, "mla_paged_attention: expected sliding_window to be an integer >= 1, got 0"),
    "scale": ({"sm_scale": float("nan")}, "mla_paged_attention: expected sm_scale to be a finite number, got nan"),
    "nope_rank": ({"q_nope": jnp.zeros((6, 48))}, r"q_nope \[num_tokens, num_q_heads, latent_dim\] .* got \(6, 48\)"),
    "pe_shape": ({"q_pe": jnp.zeros((6, 2, 8))}, r"q_pe .* of shape \(6, 3, any\), got \(6, 2, 8\)"),
    "empty": (
        {"q_nope": jnp.zeros((0, 3, 16)), "q_pe": jnp.zeros((0, 3, 8))},
        r"at least one token, head and number, got \(0, 3, 16\) and \(0, 3, 8\)",
    ),
    "q_dtype": ({"q_nope": jnp.zeros((6, 3, 16), jnp.int32)}, "expected q_nope of dtype float32, .* got int32"),
    "pe_dtype": ({"q_pe": jnp.zeros((6, 3, 8), jnp.bfloat16)}, "q_pe of dtype float32 as q_nope, got bfloat16"),
    "pages": ({"pages": PAGES * 2}, r"expected pages to be a tuple \(latent,\) of one array, got 2 arrays"),
    "pages_type": ({"pages": PAGES[0]}, r"expected pages to be a tuple \(latent,\) of one array, got ArrayImpl"),
    "pages_dtype": ({"pages": (PAGES[0].astype("int32"),)}, "expected pages of a dtype out of .*, got int32"),
    "pages_dim": (
        {"pages": (jnp.zeros((5, 4, 32)),)},
        r"pages\[0\] \[pages, page_size, 24\] or \[pages, rows, 1, packing, 128\], got \(5, 4, 32\)",
    ),
    "pages_rank": ({"pages": (jnp.zeros((5, 24)),)}, r"expected pages\[0\] .*, got \(5, 24\)"),
    "page_size": ({"page_size": 3}, r"expected page_size of pages in \(3, 4\], got 3"),
    "page_size_packed": ({"pages": PACKED, "page_size": 5}, r"expected page_size of pages in \(0, 4\], got 5"),
    "page_size_type": ({"page_size": 4.0}, "expected page_size of pages to be an integer >= 1, got 4.0"),
    "no_slots": ({"new_kv": NEW_KV}, "expected slot_mapping along with new_kv, got None; pass both or neither"),
    "no_kv": ({"slot_mapping": SLOTS}, "expected new_kv along with slot_mapping, got None; pass both or neither"),
    "kv_type": ({"new_kv": NEW_KV[0], "slot_mapping": SLOTS}, r"to be a pair \(latent, rotated key\), got ArrayImpl"),
    "kv_shape": (
        {"new_kv": (NEW_KV[0], NEW_KV[0]), "slot_mapping": SLOTS},
        r"expected new_kv\[1\] .* of shape \(6, 8\), got \(6, 16\)",
    ),
    "kv_dtype": (
        {"new_kv": (NEW_KV[0].astype("int32"), NEW_KV[1]), "slot_mapping": SLOTS},
        r"expected new_kv\[0\] of dtype float32, .* got int32",
    ),
    "kv_dtypes": (
        {"new_kv": (NEW_KV[0], NEW_KV[1].astype("bfloat16")), "slot_mapping": SLOTS},
        "expected new_kv of one dtype, got float32 and bfloat16",
    ),
    "slots_shape": ({"new_kv": NEW_KV, "slot_mapping": SLOTS[1:]}, r"slot_mapping .* of shape \(6\), got \(5,\)"),
    "slots_dtype": ({"new_kv": NEW_KV, "slot_mapping": jnp.zeros(6)}, "slot_mapping of dtype int32, got float32"),
    "slots": ({"new_kv": NEW_KV, "slot_mapping": SLOTS + 21}, r"expected slots in \[-1, 20\), got 20 \.\.\. 20"),
    "lens_long": ({"seq_lens": ints(3, 9, 0)}, r"expected seq_lens from the query lengths \[1 3\] to 8, got \[3 9\]"),
    "sinks": ({"sinks": jnp.zeros(2)}, r"expected sinks \[num_q_heads\] of shape \(3\), got \(2,\)"),
    "sinks_dtype": ({"sinks": ints(0, 0, 0)}, "expected sinks of dtype float32, bfloat16 or float16, got int32"),
    "k_scale": ({"k_scale": jnp.ones(1)}, r"expected k_scale of shape \(\), got \(1,\)"),
    "schedule": ({"schedule": (), "backend": "reference"}, "expected schedule None or DecodeStep"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    change, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        mla_paged_attention(**{**GOOD, **change})


def test_good_arguments() -> None:
    """The base of the cases above is itself accepted; a page may have less than the room that packing leaves."""
    assert mla_paged_attention(**GOOD).out.shape == (6, 3, 16)
    packed = {**GOOD, "pages": PACKED, "page_size": 3, "seq_lens": ints(3, 6, 0)}
    assert mla_paged_attention(**packed, return_lse=True).lse.shape == (6, 3)

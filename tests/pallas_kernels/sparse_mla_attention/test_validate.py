"""Every argument that does not fit is named, with what was expected and what came."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.latent_entries import LatentFp8
from pallas_kernels.sparse_mla_attention import plan, sparse_mla_attention


def ints(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


PAGES = (jnp.zeros((5, 4, 24)),)
TABLES = jnp.zeros((3, 2), jnp.int32)
SLOTS = jnp.full(6, -1, jnp.int32)
STEP: dict[str, Any] = {
    "block_tables": TABLES,
    "seq_lens": ints(3, 8, 0),
    "query_start_loc": ints(0, 1, 4, 4),
    "distribution": ints(1, 1, 2),
}
GOOD: dict[str, Any] = {"q": jnp.zeros((6, 3, 24)), "pages": PAGES, **STEP, "sm_scale": 0.5, "sliding_window": 3}
COMPRESSED: dict[str, Any] = {"compressed_pages": PAGES, "compressed_tables": TABLES, "tokens_per_state": 2}
FP8 = LatentFp8(rope_dim=8, group=16)
BYTES = (jnp.zeros((5, 4, 34), jnp.int8),)
PLANNED = plan(**STEP, num_tokens=6, sliding_window=2, page_size=4)
BAD = {
    "backend": ({"backend": "x"}, "sparse_mla_attention: expected backend out of .*, got 'x'"),
    "scale": ({"sm_scale": float("inf")}, "sparse_mla_attention: expected sm_scale to be a finite number, got inf"),
    "q_rank": ({"q": jnp.zeros((6, 72))}, r"expected q \[num_tokens, num_q_heads, dim\] .* got \(6, 72\)"),
    "q_dtype": ({"q": jnp.zeros((6, 3, 24), jnp.int32)}, "expected q of dtype float32, .* got int32"),
    "q_empty": ({"q": jnp.zeros((0, 3, 24))}, r"at least one token, head and number, got q of shape \(0, 3, 24\)"),
    "window": ({"sliding_window": -1}, "expected sliding_window to be an integer >= 0, got -1"),
    "nothing_seen": ({**COMPRESSED, "sliding_window": 0}, "expected topk_indices where sliding_window is 0, got None"),
    "pages": ({"pages": (jnp.zeros((5, 4, 32)),)}, r"expected pages\[0\] .*24.* got \(5, 4, 32\)"),
    "page_size": ({"page_size": 5}, r"expected page_size of pages in \(3, 4\], got 5"),
    "entries_dim": ({"entries": LatentFp8()}, "sparse_mla_attention: pages: expected 64 numbers .* got 24"),
    "entries_dtype": (
        {"entries": FP8, "pages": (jnp.zeros((5, 4, 34)),)},
        r"expected pages of dtype int8 for entries LatentFp8\(.*\), got float32",
    ),
    "indices_alone": ({"topk_indices": jnp.zeros((6, 2), jnp.int32)}, "topk_indices None without compressed_pages"),
    "part": ({**COMPRESSED, "tokens_per_state": None}, r"expected all of \[.*\] or none, got no tokens_per_state"),
    "part_pages": ({**COMPRESSED, "compressed_pages": None}, "or none, got no compressed_pages"),
    "ratio": ({**COMPRESSED, "tokens_per_state": 0}, "expected tokens_per_state to be an integer >= 1, got 0"),
    "tables_rank": ({**COMPRESSED, "compressed_tables": TABLES[0]}, r"compressed_tables \[num_seqs, .* got \(2,\)"),
    "tables_dtype": (
        {**COMPRESSED, "compressed_tables": TABLES * 1.0},
        "compressed_tables of dtype int32, got float32",
    ),
    "tables_rows": (
        {**COMPRESSED, "compressed_tables": TABLES[:2]},
        r"expected compressed_tables of 3 rows as block_tables and at least one column, got \(2, 2\)",
    ),
    "tables_short": (
        {**COMPRESSED, "compressed_tables": TABLES[:, :1], "tokens_per_state": 1},
        "expected at most 4 entries in compressed_tables, got 8",
    ),
    "compressed_pages": (
        {**COMPRESSED, "compressed_pages": PAGES * 2},
        r"expected compressed_pages to be a tuple \(latent,\) of one array, got 2 arrays",
    ),
    "indices": ({**COMPRESSED, "topk_indices": SLOTS}, r"expected topk_indices \[num_tokens, k\] .* got \(6,\)"),
    "indices_dtype": ({**COMPRESSED, "topk_indices": jnp.zeros((6, 2))}, "topk_indices of dtype int32, got float32"),
    "no_indices": (
        {**COMPRESSED, "topk_indices": jnp.zeros((6, 0), jnp.int32)},
        "k, the columns of topk_indices, to be an integer >= 1, got 0",
    ),
    "no_slots": ({"new_kv": jnp.zeros((6, 24))}, "expected slot_mapping along with new_kv, got None"),
    "no_kv": ({"slot_mapping": SLOTS}, "expected new_kv along with slot_mapping, got None"),
    "kv_shape": ({"new_kv": jnp.zeros((6, 20)), "slot_mapping": SLOTS}, r"expected new_kv .* got \(6, 20\)"),
    "kv_dtype": (
        {"new_kv": jnp.zeros((6, 24), jnp.int8), "slot_mapping": SLOTS},
        "expected new_kv of dtype float32, .* got int8",
    ),
    "slots_shape": ({"new_kv": jnp.zeros((6, 24)), "slot_mapping": SLOTS[1:]}, r"slot_mapping .* got \(5,\)"),
    "slots_dtype": ({"new_kv": jnp.zeros((6, 24)), "slot_mapping": SLOTS * 1.0}, "slot_mapping of dtype int32"),
    "slots": ({"new_kv": jnp.zeros((6, 24)), "slot_mapping": SLOTS + 21}, r"slots in \[-1, 20\), got 20"),
    "lens": ({"seq_lens": ints(3, 9, 0)}, r"expected seq_lens from the query lengths \[1 3\] to 8, got \[3 9\]"),
    "sinks": ({"sinks": jnp.zeros(2)}, r"expected sinks \[num_q_heads\] of shape \(3\), got \(2,\)"),
    "sinks_dtype": ({"sinks": ints(0, 0, 0)}, "expected sinks of dtype float32, .* got int32"),
    "schedule": ({"schedule": ()}, r"expected schedule to be what plan\(\) returns, got tuple"),
    "schedule_window": ({"schedule": PLANNED}, r"expected a schedule of \(6, 3\) .*, got \(6, 2\); plan it again"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    change, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        sparse_mla_attention(**{**GOOD, **change})


def test_good_arguments() -> None:
    """The base of the cases above is itself accepted, traced as well."""
    shapes = jax.eval_shape(
        lambda x: sparse_mla_attention(**{**x, **COMPRESSED, "sm_scale": 0.5, "sliding_window": 3}), GOOD
    )
    assert shapes.out.shape == (6, 3, 24)
    fp8 = {**GOOD, **COMPRESSED, "pages": BYTES, "compressed_pages": BYTES, "entries": FP8}
    assert sparse_mla_attention(**fp8, return_lse=True).lse.shape == (6, 3)

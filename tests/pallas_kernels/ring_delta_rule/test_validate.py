"""Every argument that does not fit is named, with what was expected and what came."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.ring_delta_rule import DeltaRing, ring_delta_rule


def ints(*values: Any) -> jax.Array:
    return jnp.array(values, jnp.int32)


def ring(keys: Any = (7, 4, 2, 3), deltas: Any = (7, 4, 4, 5), decays: Any = (7, 4, 4)) -> DeltaRing:
    return DeltaRing(jnp.zeros(keys), jnp.zeros(deltas), jnp.zeros(decays))


GOOD: dict[str, Any] = {
    "q": jnp.zeros((6, 2, 3)),
    "k": jnp.zeros((6, 2, 3)),
    "v": jnp.zeros((6, 4, 5)),
    "g": jnp.zeros((6, 4)),
    "beta": jnp.zeros((6, 4)),
    "states": jnp.zeros((7, 4, 3, 5)),
    "ring": ring(),
    "query_start_loc": ints(0, 1, 3, 3, 6),
    "distribution": ints(1, 1, 4),
    "state_read": ints(1, 2, 0, 4),
    "state_write": ints(1, 3, 0, 5),
    "num_held": ints(3, 4, 0, 1),
    "writes_state": jnp.array([False, True, False, True]),
    "max_new_tokens": 2,
}
BAD = {
    "backend": ({"backend": "x"}, "ring_delta_rule: expected backend out of .*, got 'x'"),
    "q": ({"q": jnp.zeros((6, 3))}, r"ring_delta_rule: expected q \[num_tokens, key_heads, key_dim\] .* got \(6, 3\)"),
    "heads": ({"v": jnp.zeros((6, 3, 5))}, "ring_delta_rule: expected key heads that divide 3 value heads, got 2"),
    "states": (
        {"states": jnp.zeros((7, 4, 5, 3))},
        r"ring_delta_rule: expected states .* of shape \(any, 4, 3, 5\), got \(7, 4, 5, 3\)",
    ),
    "dtype": ({"beta": jnp.zeros((6, 4), jnp.int32)}, "ring_delta_rule: expected beta of dtype float32, .* got int32"),
    "scale": ({"scale": float("nan")}, "ring_delta_rule: expected scale to be None or a finite number, got nan"),
    "l2norm": ({"use_qk_l2norm": 1}, "ring_delta_rule: expected use_qk_l2norm to be True or False, got 1"),
    "ring": ({"ring": tuple(ring())}, r"expected ring to be a DeltaRing\(keys, deltas, decays\), got tuple"),
    "keys": (
        {"ring": ring(keys=(7, 2, 4, 3))},
        r"expected ring.keys \[pages, slots, key_heads, key_dim\] of shape \(7, any, 2, 3\), got \(7, 2, 4, 3\)",
    ),
    "keys_dtype": (
        {"k": jnp.zeros((6, 2, 3), jnp.bfloat16)},
        "ring.keys in the dtype of k, bfloat16, got float32; keys",
    ),
    "deltas": (
        {"ring": ring(deltas=(7, 5, 4, 5))},
        r"ring.deltas \[pages, slots, value_heads, value_dim\] of shape \(7, 4, 4, 5\), got \(7, 5, 4, 5\)",
    ),
    "decays": (
        {"g": jnp.zeros((6, 4, 3))},
        r"ring.decays \[pages, slots, value_heads, key_dim\] of shape \(7, 4, 4, 3\), got \(7, 4, 4\)",
    ),
    "decays_dtype": (
        {"ring": ring()._replace(decays=jnp.zeros((7, 4, 4), jnp.int32))},
        "expected ring.decays of dtype float32, bfloat16 or float16, got int32",
    ),
    "no_slot": ({"ring": ring((7, 0, 2, 3), (7, 0, 4, 5), (7, 0, 4))}, "expected a ring of at least one slot, got 0"),
    "most": ({"max_new_tokens": 0}, "expected max_new_tokens to be an integer >= 1, got 0"),
    "most_slots": (
        {"max_new_tokens": 5},
        "expected max_new_tokens of at most the ring's 4 slots, got 5; make the ring",
    ),
    "read": (
        {"state_read": ints([1], [2], [0], [4])},
        r"expected state_read \[num_seqs\] of shape \(any\), got \(4, 1",
    ),
    "write": ({"state_write": ints(1, 3)}, r"expected state_write \[num_seqs\] of shape \(4\), got \(2,\)"),
    "held": ({"num_held": ints(1, 3)}, r"expected num_held \[num_seqs\] of shape \(4\), got \(2,\)"),
    "writes": ({"writes_state": ints(0, 0, 0, 1)}, "expected writes_state of dtype bool, got int32"),
    "writes_rows": (
        {"writes_state": jnp.array([True])},
        r"expected writes_state \[num_seqs\] of shape \(4\), got \(1,\)",
    ),
    "held_dtype": ({"num_held": jnp.zeros(4)}, "expected num_held of dtype int32, got float32"),
    "starts": ({"query_start_loc": ints(0, 1, 3, 3, 7)}, "expected query_start_loc to rise from 0 to at most 6"),
    "read_page": ({"state_read": ints(1, 7, 0, 4)}, r"expected state_read in \[0, 7\), got 1 ... 7"),
    "write_page": ({"state_write": ints(1, 3, 0, -1)}, r"expected state_write in \[0, 7\), got -1 ... 3"),
    "twice": ({"state_write": ints(1, 5, 0, 5)}, "expected each page in state_write once, got page 5 twice"),
    "foreign": ({"state_write": ints(1, 4, 0, 5)}, "page read and written by two sequences, got page 4; copy it first"),
    "most_held": ({"num_held": ints(3, 5, 0, 1)}, r"expected num_held in \[0, 4\], got 1 ... 5"),
    "held_of_nothing": ({"state_read": ints(1, 0, 0, 4)}, "expected num_held 0 where state_read is 0, .* got 4"),
    "elsewhere": (
        {"state_write": ints(6, 3, 0, 5)},
        "expected state_write to be state_read where writes_state is False, got pages 6 and 1; set writes_state to go",
    ),
    "over": (
        {"num_held": ints(4, 4, 0, 1)},
        "expected held and new tokens to fit the ring's 4 slots, got 4 and 1; set writes_state, which",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    change, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        ring_delta_rule(**{**GOOD, **change})


def test_good_arguments() -> None:
    """The base of the cases above is itself accepted; what a sequence that does nothing names may be any page."""
    assert ring_delta_rule(**GOOD, scale=2).out.shape == (6, 4, 5)
    per_channel = {"g": jnp.zeros((6, 4, 3)), "ring": ring(decays=(7, 4, 4, 3))}
    assert ring_delta_rule(**GOOD | per_channel).states.shape == (7, 4, 3, 5)
    idle = {"state_read": ints(1, 2, 9, 4), "state_write": ints(1, 3, 1, 5), "num_held": ints(3, 4, 9, 1)}
    assert ring_delta_rule(**GOOD | idle).ring.keys.shape == (7, 4, 2, 3)


def test_a_platform_without_a_kernel_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="ring_delta_rule: there is no gpu kernel; use backend='auto'"):
        ring_delta_rule(**GOOD, backend="gpu")

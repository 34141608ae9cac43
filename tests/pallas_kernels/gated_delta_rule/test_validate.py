"""Every argument that does not fit is named, with what was expected and what came."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.gated_delta_rule import gated_delta_rule


def ints(*values: Any) -> jax.Array:
    return jnp.array(values, jnp.int32)


GOOD: dict[str, Any] = {
    "q": jnp.zeros((6, 2, 3)),
    "k": jnp.zeros((6, 2, 3)),
    "v": jnp.zeros((6, 4, 5)),
    "g": jnp.zeros((6, 4)),
    "beta": jnp.zeros((6, 4)),
    "states": jnp.zeros((7, 4, 3, 5)),
    "query_start_loc": ints(0, 1, 4, 4),
    "distribution": ints(1, 1, 2),
    "state_read": ints(1, 2, 0),
    "state_write": ints(1, 3, 0),
    "has_initial_state": jnp.array([True, False, False]),
}
DRAFTS = {"state_write": ints([9, 1], [5, 3], [0, 0]), "has_initial_state": jnp.array([True, True, False])}
CHECKPOINTS = {"checkpoint_ends": ints([0, 0], [1, 2], [0, 0]), "checkpoint_pages": ints([0, 0], [5, 6], [0, 0])}
BAD = {
    "backend": ({"backend": "x"}, "gated_delta_rule: expected backend out of .*, got 'x'"),
    "q": ({"q": jnp.zeros((6, 3))}, r"expected q \[num_tokens, key_heads, key_dim\] .* got \(6, 3\)"),
    "k": ({"k": jnp.zeros((6, 2, 5))}, r"expected k as q of shape \(6, 2, 3\), got \(6, 2, 5\)"),
    "v": ({"v": jnp.zeros((5, 4, 5))}, r"v \[num_tokens, value_heads, value_dim\] of shape \(6, any, any\), got \(5"),
    "empty": ({"v": jnp.zeros((6, 0, 5))}, r"expected at least one token, head and number, got q .* and v \(6, 0, 5\)"),
    "heads": ({"v": jnp.zeros((6, 3, 5))}, "expected key heads that divide 3 value heads, got 2"),
    "g": ({"g": jnp.zeros((6, 4, 5))}, r"expected g .* of shape \(6, 4\), or .* key \(6, 4, 3\), got \(6, 4, 5\)"),
    "beta": ({"beta": jnp.zeros((6, 2))}, r"expected beta \[num_tokens, value_heads\] of shape \(6, 4\), got \(6, 2\)"),
    "states": (
        {"states": jnp.zeros((7, 4, 5, 3))},
        r"states \[pages, value_heads, key_dim, value_dim\] of shape \(any, 4, 3, 5\), got \(7, 4, 5, 3\)",
    ),
    "no_page": ({"states": jnp.zeros((0, 4, 3, 5))}, r"expected at least the null page, got states \(0, 4, 3, 5\)"),
    "dtype": ({"beta": jnp.zeros((6, 4), jnp.int32)}, "expected beta of dtype float32, .* got int32"),
    "scale": ({"scale": float("nan")}, "expected scale to be None or a finite number, got nan"),
    "scale_type": ({"scale": True}, "expected scale to be None or a finite number, got True"),
    "l2norm": ({"use_qk_l2norm": 1}, "expected use_qk_l2norm to be True or False, got 1"),
    "write": ({"state_write": ints(1, 3)}, r"state_write \[num_seqs\] or \[num_seqs, states_kept\] of .* got \(2,\)"),
    "write_rows": (
        {"state_write": ints([1, 3])},
        r"state_write \[num_seqs, states_kept\] of shape \(3, any\), got",
    ),
    "no_column": (
        {"state_write": jnp.zeros((3, 0), jnp.int32)},
        r"state_write \[num_seqs, states_kept\] of at least one state, got \(3, 0\)",
    ),
    "read": ({"state_read": ints([1], [2], [0])}, r"expected state_read \[num_seqs\] of shape \(any\), got \(3, 1\)"),
    "initial": ({"has_initial_state": jnp.array([True])}, r"has_initial_state \[num_seqs\] of shape \(3\), got \(1,\)"),
    "initial_dtype": ({"has_initial_state": ints(1, 0, 0)}, "has_initial_state of dtype bool, got int32"),
    "starts": ({"query_start_loc": ints(0, 1, 4)}, r"query_start_loc \[num_seqs \+ 1\] of shape \(4\), got \(3,\)"),
    "ends": ({"distribution": ints(1, 1)}, r"expected distribution \[3\] of shape \(3\), got \(2,\)"),
    "write_dtype": ({"state_write": jnp.zeros(3)}, "expected state_write of dtype int32, got float32"),
    "rows": ({"distribution": ints(1, 1, 4)}, r"expected distribution to rise within \[0, 3\], got \[1, 1, 4\]"),
    "decode": ({"distribution": ints(2, 2, 2)}, r"expected one query token per decode sequence, got \[1 3\]"),
    "start": ({"query_start_loc": ints(0, 1, 7, 7)}, r"query_start_loc to rise from 0 to at most 6, got \[0 1 7\]"),
    "read_far": ({"state_read": ints(7, 2, 0)}, r"expected state_read in \[0, 7\), got 7 \.\.\. 7"),
    "write_far": ({"state_write": ints(1, -1, 0)}, r"expected state_write in \[0, 7\), got -1 \.\.\. 1"),
    "twice": ({"state_write": ints(3, 3, 0)}, "expected each page in state_write once, got page 3 twice"),
    "twice_in_a_row": ({"state_write": ints([0, 1], [3, 3], [0, 0])}, "in state_write once, got page 3 twice"),
    "foreign": (
        {"state_read": ints(3, 2, 0)},
        "expected no page read and written by two sequences, got page 3; copy it first",
    ),
    "checkpoint_without_page": (
        {"checkpoint_ends": CHECKPOINTS["checkpoint_ends"]},
        "expected checkpoint_pages beside checkpoint_ends, got None; give both or none",
    ),
    "checkpoint_without_end": (
        {"checkpoint_pages": CHECKPOINTS["checkpoint_pages"]},
        "expected checkpoint_ends beside checkpoint_pages, got None; give both or none",
    ),
    "checkpoint_rows": (
        CHECKPOINTS | {"checkpoint_ends": ints([1, 2])},
        r"checkpoint_ends \[num_seqs, checkpoints\] of shape \(3, any\), got \(1, 2\)",
    ),
    "checkpoint_columns": (
        CHECKPOINTS | {"checkpoint_pages": ints([0], [5], [0])},
        r"checkpoint_pages \[num_seqs, checkpoints\] of shape \(3, 2\), got \(3, 1\)",
    ),
    "no_checkpoint": (
        dict.fromkeys(CHECKPOINTS, jnp.zeros((3, 0), jnp.int32)),
        r"of at least one checkpoint, got \(3, 0\); give None",
    ),
    "checkpoint_dtype": (
        CHECKPOINTS | {"checkpoint_ends": jnp.zeros((3, 2))},
        "expected checkpoint_ends of dtype int32, got float32",
    ),
    "checkpoint_last": (
        CHECKPOINTS | {"checkpoint_ends": ints([0, 0], [1, 3], [0, 0])},
        "expected checkpoint_ends from 1 to before the last new token, got 3 of 3; .* belongs into state_write",
    ),
    "checkpoint_first": (
        CHECKPOINTS | {"checkpoint_ends": ints([0, 0], [-1, 2], [0, 0])},
        "expected checkpoint_ends from 1 to before the last new token, got -1 of 3",
    ),
    "checkpoints_fall": (
        CHECKPOINTS | {"checkpoint_ends": ints([0, 0], [2, 1], [0, 0])},
        r"expected checkpoint_ends that rise, got \[2 1\] of sequence 1",
    ),
    "checkpoint_far": (
        CHECKPOINTS | {"checkpoint_pages": ints([0, 0], [5, 7], [0, 0])},
        r"expected checkpoint_pages in \[0, 7\), got 5 \.\.\. 7",
    ),
    "checkpoint_twice": (
        CHECKPOINTS | {"checkpoint_pages": ints([0, 0], [5, 1], [0, 0])},
        "each page in state_write and checkpoint_pages once, got page 1 twice",
    ),
    "checkpoint_foreign": (
        CHECKPOINTS | {"state_read": ints(6, 2, 0)},
        "read and written by two sequences, got page 6; copy it first",
    ),
    "checkpoint_of_draft": (
        CHECKPOINTS | {"state_write": ints([0, 1], [4, 3], [0, 0])},
        "one page for the state after a token, got state_write and checkpoint_pages after 2 tokens of sequence 1; name",
    ),
    "foreign_draft": (DRAFTS | {"state_read": ints(5, 5, 0)}, "read and written by two sequences, got page 5"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    change, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(**{**GOOD, **change})


def test_good_arguments() -> None:
    """The base of the cases above is itself accepted; what stands for tokens that there are not may be any page."""
    assert gated_delta_rule(**GOOD, scale=2).out.shape == (6, 4, 5)
    assert gated_delta_rule(**GOOD | {"g": jnp.zeros((6, 4, 3))}).states.shape == (7, 4, 3, 5)
    idle = {"query_start_loc": ints(0, 0, 3, 3), "state_read": ints(9, 2, 0), "state_write": ints(3, 3, 0)}
    assert gated_delta_rule(**GOOD | idle).states.shape == (7, 4, 3, 5)
    assert gated_delta_rule(**GOOD | CHECKPOINTS).states.shape == (7, 4, 3, 5)
    assert gated_delta_rule(**GOOD | DRAFTS | {"state_read": ints(1, 5, 0)}).out.shape == (6, 4, 5)

"""Every argument that does not fit is named, with what was expected and what came."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.ssm_update import causal_conv1d, selective_scan


def ints(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


STEP: dict[str, Any] = {
    "query_start_loc": ints(0, 1, 4, 4),
    "distribution": ints(1, 1, 2),
    "state_read": ints(1, 2, 0),
    "state_write": ints(1, 3, 0),
    "has_initial_state": jnp.array([True, False, False]),
}
CONV: dict[str, Any] = {"x": jnp.zeros((6, 8)), "states": jnp.zeros((5, 8, 3)), "weight": jnp.zeros((8, 4)), **STEP}
MAMBA1: dict[str, Any] = {
    "x": jnp.zeros((6, 8)),
    "states": jnp.zeros((5, 8, 4)),
    "dt": jnp.zeros((6, 8)),
    "a": jnp.zeros((8, 4)),
    "b": jnp.zeros((6, 4)),
    "c": jnp.zeros((6, 4)),
    **STEP,
}
MAMBA2 = MAMBA1 | {
    "x": jnp.zeros((6, 8, 2)),
    "states": jnp.zeros((5, 8, 2, 4)),
    "a": jnp.zeros(8),
    "b": jnp.zeros((6, 2, 4)),
    "c": jnp.zeros((6, 2, 4)),
}
BAD_CONV = {
    "backend": ({"backend": "x"}, "causal_conv1d: expected backend out of .*, got 'x'"),
    "x": ({"x": jnp.zeros((6, 8, 1))}, r"expected x \[num_tokens, channels\] .* got \(6, 8, 1\)"),
    "weight": ({"weight": jnp.zeros((4, 8))}, r"expected weight \[channels, taps\] of shape \(8, any\), got \(4, 8\)"),
    "taps": ({"weight": jnp.zeros((8, 1))}, r"at least one token, one channel and two taps, got \(6, 8\), \(8, 1\)"),
    "states": ({"states": jnp.zeros((5, 8, 4))}, r"expected states .* of shape \(any, 8, 3\), got \(5, 8, 4\)"),
    "dtype": ({"states": jnp.zeros((5, 8, 3), jnp.int8)}, "expected states of dtype float32, .* got int8"),
    "bias": ({"bias": jnp.zeros(3)}, r"expected bias \[channels\] of shape \(8\), got \(3,\)"),
    "bias_dtype": ({"bias": jnp.zeros(8, jnp.int8)}, "expected bias of dtype float32, .* got int8"),
    "activation": ({"activation": "relu"}, "expected activation 'silu' or None, got 'relu'"),
}
BAD_STEP = {
    "read": ({"state_read": ints(1, 2)[None]}, r"expected state_read \[num_seqs\] .* got \(1, 2\)"),
    "write": ({"state_write": ints(1, 2)}, r"state_write \[num_seqs\] or \[num_seqs, states_kept\] of .* got \(2,\)"),
    "no_column": (
        {"state_write": jnp.zeros((3, 0), jnp.int32)},
        r"state_write \[num_seqs, states_kept\] of at least one state, got \(3, 0\)",
    ),
    "twice_in_a_row": (
        {"state_write": jnp.array([[0, 1], [3, 3], [0, 0]], jnp.int32)},
        "in state_write once, got page 3 twice",
    ),
    "initial": ({"has_initial_state": jnp.zeros(2, bool)}, r"has_initial_state \[num_seqs\] of shape \(3\), got"),
    "starts": ({"query_start_loc": ints(0, 1, 4)}, r"query_start_loc \[num_seqs \+ 1\] of shape \(4\), got \(3,\)"),
    "ends": ({"distribution": ints(1, 1)}, r"expected distribution \[3\] of shape \(3\), got \(2,\)"),
    "read_dtype": ({"state_read": jnp.zeros(3)}, "expected state_read of dtype int32, got float32"),
    "initial_dtype": ({"has_initial_state": ints(1, 0, 0)}, "has_initial_state of dtype bool, got int32"),
    "rows": ({"distribution": ints(1, 1, 4)}, r"expected distribution to rise within \[0, 3\], got \[1, 1, 4\]"),
    "decode": ({"distribution": ints(2, 2, 2)}, r"expected one query token per decode sequence, got \[1 3\]"),
    "start": ({"query_start_loc": ints(0, 1, 7, 7)}, r"query_start_loc to rise from 0 to at most 6, got \[0 1 7\]"),
    "read_far": ({"state_read": ints(5, 2, 0)}, r"expected state_read in \[0, 5\), got 5 \.\.\. 5"),
    "write_far": ({"state_write": ints(1, -1, 0)}, r"expected state_write in \[0, 5\), got -1 \.\.\. 1"),
    "twice": ({"state_write": ints(3, 3, 0)}, "expected each page in state_write once, got page 3 twice"),
    "checkpoint": (
        {"checkpoint_ends": jnp.array([[0], [3], [0]]), "checkpoint_pages": jnp.array([[0], [4], [0]])},
        "expected checkpoint_ends from 1 to before the last new token, got 3 of 3",
    ),
    "foreign": (
        {"state_read": ints(3, 2, 0)},
        "expected no page read and written by two sequences, got page 3; copy it first",
    ),
}
BAD_SCAN = {
    "backend": (MAMBA1, {"backend": "x"}, "selective_scan: expected backend out of .*, got 'x'"),
    "x": (MAMBA1, {"x": jnp.zeros(6)}, r"of Mamba 1 or \[num_tokens, heads, head_dim\] of Mamba 2, got shape \(6,\)"),
    "states": (MAMBA1, {"states": jnp.zeros((5, 7, 4))}, r"expected states \[pages, channels, .* got \(5, 7, 4\)"),
    "states2": (MAMBA2, {"states": jnp.zeros((5, 8, 3, 4))}, r"states \[pages, heads, .* got \(5, 8, 3, 4\)"),
    "empty": (MAMBA2, {"x": jnp.zeros((6, 8, 0)), "states": jnp.zeros((5, 8, 0, 4))}, "at least one token, head, page"),
    "dt": (MAMBA2, {"dt": jnp.zeros((6, 8, 2))}, r"expected dt \[num_tokens, heads\] of shape \(6, 8\), got"),
    "a": (MAMBA1, {"a": jnp.zeros(8)}, r"expected a \[channels, state_dim\] of shape \(8, 4\), got \(8,\)"),
    "a2": (MAMBA2, {"a": jnp.zeros((8, 4))}, r"expected a \[heads\] of shape \(8\), got \(8, 4\)"),
    "b": (MAMBA1, {"b": jnp.zeros((6, 1, 4))}, r"expected b \[num_tokens, state_dim\] of shape \(6, 4\), got"),
    "b2": (MAMBA2, {"b": jnp.zeros((6, 4))}, r"expected b \[num_tokens, groups, state_dim\] of shape .* got \(6, 4\)"),
    "c": (MAMBA2, {"c": jnp.zeros((6, 1, 4))}, r"expected c .* of shape \(6, 2, 4\), got \(6, 1, 4\)"),
    "groups": (MAMBA2, {"b": jnp.zeros((6, 3, 4))}, "expected groups that divide 8 heads, got 3"),
    "d": (MAMBA2, {"d": jnp.zeros((8, 2))}, r"expected d \[heads\] of shape \(8\), got \(8, 2\)"),
    "bias": (MAMBA1, {"dt_bias": jnp.zeros(4)}, r"expected dt_bias \[heads\] of shape \(8\), got \(4,\)"),
    "dtype": (MAMBA1, {"d": ints(*range(8))}, "expected d of dtype float32, .* got int32"),
    "limit": (MAMBA1, {"dt_limit": (1.0, 0.5)}, r"dt_limit to be a pair 0 <= least <= most, got \(1.0, 0.5\)"),
    "limit_type": (MAMBA1, {"dt_limit": 1.0}, "expected dt_limit to be a pair 0 <= least <= most, got 1.0"),
}


@pytest.mark.parametrize("name", [*BAD_CONV, *BAD_STEP])
def test_bad_arguments_of_the_convolution(name: str) -> None:
    change, message = (BAD_CONV | BAD_STEP)[name]
    with pytest.raises(ValueError, match=message):
        causal_conv1d(**{**CONV, **change})


@pytest.mark.parametrize("name", BAD_SCAN)
def test_bad_arguments_of_the_scan(name: str) -> None:
    good, change, message = BAD_SCAN[name]
    with pytest.raises(ValueError, match=message):
        selective_scan(**{**good, **change})


@pytest.mark.parametrize("name", ["twice", "checkpoint"])
def test_a_bad_step_of_the_scan(name: str) -> None:
    change, message = BAD_STEP[name]
    with pytest.raises(ValueError, match=f"selective_scan: {message}"):
        selective_scan(**{**MAMBA1, **change})


def test_good_arguments() -> None:
    """The bases of the cases above are themselves accepted; rows without tokens may name any pages."""
    assert causal_conv1d(**CONV, activation=None).out.shape == (6, 8)
    assert selective_scan(**MAMBA2, dt_limit=[0, 2]).out.shape == (6, 8, 2)
    idle = {"query_start_loc": ints(0, 0, 3, 3), "state_read": ints(9, 2, 0), "state_write": ints(3, 3, 0)}
    assert causal_conv1d(**{**CONV, **idle}).states.shape == (5, 8, 3)
    drafts = {"state_write": jnp.array([[9, 1], [4, 3], [0, 0]], jnp.int32)}
    assert causal_conv1d(**{**CONV, **drafts}).states.shape == (5, 8, 3)
    assert selective_scan(**{**MAMBA1, **drafts}).states.shape == (5, 8, 4)

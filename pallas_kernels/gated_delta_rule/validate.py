"""Checks of the arguments of gated_delta_rule: static ones always, values where they are known."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import checks
from pallas_kernels.gated_delta_rule.arguments import Options, StepArrays

OP = "gated_delta_rule"


def check_inputs(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, states: jax.Array) -> None:
    """Raises ValueError where inputs and states do not go together."""
    checks.check_array(OP, "q", q, (None, None, None), "[num_tokens, key_heads, key_dim]")
    num_tokens, key_heads, key_dim = q.shape
    checks.check_array(OP, "k", k, q.shape, "as q")
    checks.check_array(OP, "v", v, (num_tokens, None, None), "[num_tokens, value_heads, value_dim]")
    heads, value_dim = v.shape[1:]
    if not q.size or not v.size:
        raise ValueError(f"{OP}: expected at least one token, head and number, got q {q.shape} and v {v.shape}")
    if heads % key_heads:
        raise ValueError(f"{OP}: expected key heads that divide {heads} value heads, got {key_heads}")
    if np.shape(g) not in ((num_tokens, heads), (num_tokens, heads, key_dim)):
        raise ValueError(
            f"{OP}: expected g [num_tokens, value_heads] of shape ({num_tokens}, {heads}), or with a decay per number "
            f"of the key ({num_tokens}, {heads}, {key_dim}), got {np.shape(g)}"
        )
    checks.check_array(OP, "beta", beta, (num_tokens, heads), "[num_tokens, value_heads]")
    shape = (None, heads, key_dim, value_dim)
    checks.check_array(OP, "states", states, shape, "[pages, value_heads, key_dim, value_dim]")
    if not states.shape[0]:
        raise ValueError(f"{OP}: expected at least the null page, got states {states.shape}")
    named = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "states": states}
    for name, array in named.items():
        checks.check_floating(OP, name, array)


def check_options(key_dim: int, scale: Any, use_qk_l2norm: Any) -> Options:
    """The options; raises ValueError unless the scale is None or a finite number and the other True or False."""
    if scale is None:
        scale = key_dim**-0.5
    if not isinstance(scale, numbers.Real) or isinstance(scale, bool) or not math.isfinite(float(scale)):
        raise ValueError(f"{OP}: expected scale to be None or a finite number, got {scale!r}")
    if not isinstance(use_qk_l2norm, bool):
        raise ValueError(f"{OP}: expected use_qk_l2norm to be True or False, got {use_qk_l2norm!r}")
    return Options(float(scale), use_qk_l2norm)


def check_step(num_tokens: int, num_pages: int, step: StepArrays) -> None:
    """Raises ValueError where the arrays that describe the step do not fit each other and the pages."""
    checks.check_array(OP, "state_read", step.state_read, (None,), "[num_seqs]")
    num_seqs = step.state_read.shape[0]
    if np.ndim(step.state_write) == 2:
        axes = "[num_seqs, states_kept]"
        checks.check_array(OP, "state_write", step.state_write, (num_seqs, None), axes)
        if not step.state_write.shape[1]:
            raise ValueError(f"{OP}: expected state_write {axes} of at least one state, got {step.state_write.shape}")
    else:
        checks.check_array(OP, "state_write", step.state_write, (num_seqs,), "[num_seqs] or [num_seqs, states_kept]")
    checks.check_array(OP, "has_initial_state", step.has_initial_state, (num_seqs,), "[num_seqs]")
    pages = {"state_read": step.state_read, "state_write": step.state_write}
    checks.check_sequences(OP, num_seqs, step.query_start_loc, step.distribution, **pages)
    dtype = jnp.result_type(step.has_initial_state)
    if dtype != jnp.bool_:
        raise ValueError(f"{OP}: expected has_initial_state of dtype bool, got {dtype}")
    known = checks.concrete(*step)
    if known is not None:
        starts, ends, read, write, has_initial = known
        q_lens = checks.check_starts(OP, num_tokens, num_seqs, starts, ends)
        rows = slice(q_lens.size)
        _check_pages(num_pages, q_lens, read[rows], write.reshape(num_seqs, -1)[rows], has_initial[rows])


def _check_pages(num_pages: int, q_lens: np.ndarray, read: np.ndarray, write: np.ndarray, initial: np.ndarray) -> None:
    """Raises ValueError for pages that are none, written twice, or written and read by another sequence."""
    width = write.shape[1]
    reads = (q_lens > 0) & initial
    counts = np.arange(width) >= width - q_lens[:, None]  # columns of tokens that there are
    for name, ids in (("state_read", read[reads]), ("state_write", write[counts])):
        if ids.size and (ids.min() < 0 or ids.max() >= num_pages):
            raise ValueError(f"{OP}: expected {name} in [0, {num_pages}), got {ids.min()} ... {ids.max()}")
    used = np.where(counts, write, 0)
    written = np.sort(used[used > 0])
    twice = written[1:][written[1:] == written[:-1]]
    if twice.size:
        raise ValueError(f"{OP}: expected each page in state_write once, got page {twice[0]} twice")
    foreign = reads & np.isin(read, written) & ~(used == read[:, None]).any(axis=1)
    if foreign.any():
        page = read[foreign][0]
        raise ValueError(f"{OP}: expected no page read and written by two sequences, got page {page}; copy it first")

"""Checks of what describes the step of an op with recurrent states: shapes always, values where they are known."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels import checks
from pallas_kernels.state_step import StepArrays


def check_step(op: str, num_tokens: int, num_pages: int, step: StepArrays) -> None:
    """Raises ValueError where the arrays that describe the step do not fit each other and the pages."""
    checks.check_array(op, "state_read", step.state_read, (None,), "[num_seqs]")
    num_seqs = step.state_read.shape[0]
    if np.ndim(step.state_write) == 2:
        axes = "[num_seqs, states_kept]"
        checks.check_array(op, "state_write", step.state_write, (num_seqs, None), axes)
        if not step.state_write.shape[1]:
            raise ValueError(f"{op}: expected state_write {axes} of at least one state, got {step.state_write.shape}")
    else:
        checks.check_array(op, "state_write", step.state_write, (num_seqs,), "[num_seqs] or [num_seqs, states_kept]")
    checks.check_array(op, "has_initial_state", step.has_initial_state, (num_seqs,), "[num_seqs]")
    pages = {"state_read": step.state_read, "state_write": step.state_write}
    checks.check_sequences(op, num_seqs, step.query_start_loc, step.distribution, **pages)
    dtype = jnp.result_type(step.has_initial_state)
    if dtype != jnp.bool_:
        raise ValueError(f"{op}: expected has_initial_state of dtype bool, got {dtype}")
    known = checks.concrete(*step)
    if known is not None:
        starts, ends, read, write, has_initial = known
        q_lens = checks.check_starts(op, num_tokens, num_seqs, starts, ends)
        rows = slice(q_lens.size)
        _check_pages(op, num_pages, q_lens, read[rows], write.reshape(num_seqs, -1)[rows], has_initial[rows])


def _check_pages(
    op: str, num_pages: int, q_lens: np.ndarray, read: np.ndarray, write: np.ndarray, has_initial: np.ndarray
) -> None:
    """Raises ValueError for pages that are none, written twice, or written and read by another sequence."""
    width = write.shape[1]
    reads = (q_lens > 0) & has_initial
    counts = np.arange(width) >= width - q_lens[:, None]  # columns of tokens that there are
    for name, ids in (("state_read", read[reads]), ("state_write", write[counts])):
        if ids.size and (ids.min() < 0 or ids.max() >= num_pages):
            raise ValueError(f"{op}: expected {name} in [0, {num_pages}), got {ids.min()} ... {ids.max()}")
    used = np.where(counts, write, 0)
    written = np.sort(used[used > 0])
    twice = written[1:][written[1:] == written[:-1]]
    if twice.size:
        raise ValueError(f"{op}: expected each page in state_write once, got page {twice[0]} twice")
    foreign = reads & np.isin(read, written) & ~(used == read[:, None]).any(axis=1)
    if foreign.any():
        page = read[foreign][0]
        raise ValueError(f"{op}: expected no page read and written by two sequences, got page {page}; copy it first")

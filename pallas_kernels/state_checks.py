"""Checks of what describes the step of an op with recurrent states: shapes always, values where they are known."""

from __future__ import annotations

from typing import NamedTuple

import jax
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
    checks.check_sequences(op, num_seqs, step.query_start_loc, step.distribution, **pages, **_checkpoints(op, step))
    dtype = jnp.result_type(step.has_initial_state)
    if dtype != jnp.bool_:
        raise ValueError(f"{op}: expected has_initial_state of dtype bool, got {dtype}")
    known = checks.concrete(*(x for x in step if x is not None))
    if known is not None:
        starts, ends, read, write, has_initial, *checkpoints = known
        q_lens = checks.check_starts(op, num_tokens, num_seqs, starts, ends)
        rows = slice(q_lens.size)
        writes = [_last_states(q_lens, write.reshape(num_seqs, -1)[rows])]
        if checkpoints:
            writes.append(_states_on_the_way(op, q_lens, *(x[rows] for x in checkpoints)))
            _check_one_page_of_a_state(op, *writes)
        _check_pages(op, num_pages, read[rows], (q_lens > 0) & has_initial[rows], writes)


def reason_of_checkpoints(checkpoint_ends: jax.Array | None) -> str | None:
    """What a kernel without checkpoints cannot do of a call, in words; None where the call names none."""
    return None if checkpoint_ends is None else "this kernel leaves no states at checkpoints inside a step"


def _checkpoints(op: str, step: StepArrays) -> dict[str, jax.Array]:
    """The arrays of checkpoints by name; raises ValueError where one is missing or their shapes do not fit."""
    ends, pages = step.checkpoint_ends, step.checkpoint_pages
    if ends is None and pages is None:
        return {}
    if ends is None or pages is None:
        given, missing = ("ends", "pages") if pages is None else ("pages", "ends")
        raise ValueError(f"{op}: expected checkpoint_{missing} beside checkpoint_{given}, got None; give both or none")
    num_seqs, axes = step.state_read.shape[0], "[num_seqs, checkpoints]"
    checks.check_array(op, "checkpoint_ends", ends, (num_seqs, None), axes)
    checks.check_array(op, "checkpoint_pages", pages, ends.shape, axes)
    if not ends.shape[1]:
        raise ValueError(
            f"{op}: expected checkpoint_ends {axes} of at least one checkpoint, got {ends.shape}; give None"
        )
    return {"checkpoint_ends": ends, "checkpoint_pages": pages}


class _Writes(NamedTuple):
    """States that a step leaves."""

    name: str  # of the argument
    pages: np.ndarray  # int32[S, n] 0 where none is left
    ends: np.ndarray  # int32[S, n] new tokens of the sequence up to the state
    exist: np.ndarray  # bool[S, n] whether the sequence has such a token, and thus a page


def _last_states(q_lens: np.ndarray, write: np.ndarray) -> _Writes:
    """Those after the last tokens."""
    ends = q_lens[:, None] + np.arange(1 - write.shape[1], 1)
    return _Writes("state_write", write, ends, ends > 0)


def _states_on_the_way(op: str, q_lens: np.ndarray, ends: np.ndarray, pages: np.ndarray) -> _Writes:
    """Checkpoints; raises ValueError unless their lengths rise and are of tokens before the last."""
    exist = (ends != 0) & (pages != 0)
    wrong = exist & ((ends < 0) | (ends >= q_lens[:, None]))
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise ValueError(
            f"{op}: expected checkpoint_ends from 1 to before the last new token, got {ends[row, column]} of "
            f"{q_lens[row]}; the last token's state belongs into state_write"
        )
    before = np.pad(np.maximum.accumulate(np.where(exist, ends, 0), axis=1), [(0, 0), (1, 0)])[:, :-1]
    falls = (exist & (ends <= before)).any(axis=1)
    if falls.any():
        row = np.argmax(falls)
        raise ValueError(f"{op}: expected checkpoint_ends that rise, got {ends[row]} of sequence {row}")
    return _Writes("checkpoint_pages", pages, ends, exist)


def _check_one_page_of_a_state(op: str, last: _Writes, on_the_way: _Writes) -> None:
    """Raises ValueError where a token's state has a page of either kind."""
    both = (on_the_way.ends[:, :, None] == last.ends[:, None]) & on_the_way.exist[:, :, None]
    both &= (last.exist & (last.pages > 0))[:, None]
    if both.any():
        row, column, _ = np.argwhere(both)[0]
        raise ValueError(
            f"{op}: expected one page for the state after a token, got state_write and checkpoint_pages after "
            f"{on_the_way.ends[row, column]} tokens of sequence {row}; name it in state_write alone"
        )


def _check_pages(op: str, num_pages: int, read: np.ndarray, reads: np.ndarray, writes: list[_Writes]) -> None:
    """Raises ValueError for pages that are none, written twice, or written and read by another sequence."""
    for name, ids in [("state_read", read[reads]), *((x.name, x.pages[x.exist]) for x in writes)]:
        if ids.size and (ids.min() < 0 or ids.max() >= num_pages):
            raise ValueError(f"{op}: expected {name} in [0, {num_pages}), got {ids.min()} ... {ids.max()}")
    used = np.concatenate([np.where(x.exist, x.pages, 0) for x in writes], axis=1)
    written = np.sort(used[used > 0])
    twice = written[1:][written[1:] == written[:-1]]
    if twice.size:
        names = " and ".join(x.name for x in writes)
        raise ValueError(f"{op}: expected each page in {names} once, got page {twice[0]} twice")
    foreign = reads & np.isin(read, written) & ~(used == read[:, None]).any(axis=1)
    if foreign.any():
        page = read[foreign][0]
        raise ValueError(f"{op}: expected no page read and written by two sequences, got page {page}; copy it first")

"""Checks of what describes the step of an op over ring states: shapes always, values where they are known."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels import checks
from pallas_kernels.ring_step import RingArrays


def check_ring(op: str, num_pages: int, entries: dict[str, tuple[Any, tuple[int, ...], str]]) -> int:
    """Slots of a ring of arrays by name, each with the shape of an entry and its axes in words.

    Raises:
        ValueError: an array does not fit, there is no slot, or they have different numbers of slots.
    """
    num_slots: int | None = None
    for name, (array, shape, axes) in entries.items():
        checks.check_array(op, f"ring.{name}", array, (num_pages, num_slots, *shape), f"[pages, slots, {axes}]")
        checks.check_floating(op, f"ring.{name}", array)
        num_slots = array.shape[1]
    if not num_slots:
        raise ValueError(f"{op}: expected a ring of at least one slot, got {num_slots}")
    return num_slots


def check_ring_step(
    op: str, num_tokens: int, num_pages: int, num_slots: int, max_new_tokens: Any, step: RingArrays
) -> None:
    """Raises ValueError where the arrays that describe the step do not fit each other, the pages and the ring."""
    checks.check_at_least(op, "max_new_tokens", max_new_tokens, 1)
    if max_new_tokens > num_slots:
        raise ValueError(
            f"{op}: expected max_new_tokens of at most the ring's {num_slots} slots, got {max_new_tokens}; make the "
            "ring longer"
        )
    checks.check_array(op, "state_read", step.state_read, (None,), "[num_seqs]")
    num_seqs = step.state_read.shape[0]
    numbers = {name: getattr(step, name) for name in ("state_read", "state_write", "num_held")}
    for name, array in {**numbers, "writes_state": step.writes_state}.items():
        checks.check_array(op, name, array, (num_seqs,), "[num_seqs]")
    checks.check_sequences(op, num_seqs, step.query_start_loc, step.distribution, **numbers)
    dtype = jnp.result_type(step.writes_state)
    if dtype != jnp.bool_:
        raise ValueError(f"{op}: expected writes_state of dtype bool, got {dtype}")
    known = checks.concrete(*step)
    if known is not None:
        starts, ends, read, write, held, writes = known
        q_lens = checks.check_starts(op, num_tokens, num_seqs, starts, ends)
        does = (q_lens > 0) | writes[: q_lens.size]
        rows = np.flatnonzero(does)
        has_outputs = ((q_lens > 0) & (q_lens <= max_new_tokens))[rows]
        _check_pages(op, num_pages, read[rows], write[rows], writes[rows] | has_outputs)
        _check_held(op, num_slots, read[rows], held[rows])
        goes_on = has_outputs & ~writes[rows]
        _check_room(op, num_slots, *(x[rows][goes_on] for x in (read, write, held, q_lens)))


def _check_pages(op: str, num_pages: int, read: np.ndarray, write: np.ndarray, is_written: np.ndarray) -> None:
    """Raises ValueError for pages that are none, written twice, or written and read by another sequence."""
    for name, ids in (("state_read", read), ("state_write", write[is_written])):
        if ids.size and (ids.min() < 0 or ids.max() >= num_pages):
            raise ValueError(f"{op}: expected {name} in [0, {num_pages}), got {ids.min()} ... {ids.max()}")
    used = np.where(is_written, write, 0)
    written = np.sort(used[used > 0])
    twice = written[1:][written[1:] == written[:-1]]
    if twice.size:
        raise ValueError(f"{op}: expected each page in state_write once, got page {twice[0]} twice")
    foreign = (read > 0) & np.isin(read, written) & (used != read)
    if foreign.any():
        raise ValueError(
            f"{op}: expected no page read and written by two sequences, got page {read[foreign][0]}; copy it first"
        )


def _check_held(op: str, num_slots: int, read: np.ndarray, held: np.ndarray) -> None:
    """Raises ValueError for more held tokens than slots, and for some in the null page."""
    if held.size and (held.min() < 0 or held.max() > num_slots):
        raise ValueError(f"{op}: expected num_held in [0, {num_slots}], got {held.min()} ... {held.max()}")
    if held[read == 0].any():
        raise ValueError(f"{op}: expected num_held 0 where state_read is 0, the null page, got {held[read == 0].max()}")


def _check_room(
    op: str, num_slots: int, read: np.ndarray, write: np.ndarray, held: np.ndarray, q_lens: np.ndarray
) -> None:
    """Raises ValueError where new tokens go behind the held ones, but in another page or beyond the last slot."""
    other = read != write
    if other.any():
        raise ValueError(
            f"{op}: expected state_write to be state_read where writes_state is False, got pages {write[other][0]} "
            f"and {read[other][0]}; set writes_state to go on in another page"
        )
    over = held + q_lens > num_slots
    if over.any():
        raise ValueError(
            f"{op}: expected held and new tokens to fit the ring's {num_slots} slots, got {held[over][0]} and "
            f"{q_lens[over][0]}; set writes_state, which starts the ring anew"
        )

"""What a pool tells a router about its prefix cache: blocks stored, blocks removed, everything cleared.

Flow:    BlockPool -> [BlockStored | BlockRemoved | AllBlocksCleared] -> KVEventLog -> KVCacheManager.take_events
         -> a publisher (kvjax.events)
Source:  fields of vLLM distributed/kv_events.py

Routers hash tokens for themselves, so the tokens, the block size and the parent of a stored run must be exact: a run
with a null block inside is told as two events. Hashes are raw; a publisher may shorten them to 64 bits.

What a consumer may rely on of parents, beside that:

    every kind                the parent is the block before the run in its sequence, at the group's block size, or None
    kinds that keep all       it was stored before, by an event of the same group: a tree can be made of these groups
    (full attention, MLA,     alone. It may have been removed since
    with sinks)
    windows, chunks, states   it may never have been stored, there or anywhere: such groups are hashes, not a tree
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvjax.core.hashing.block_hash import BlockHash
from kvjax.core.hashing.extra_keys import LoRARequest

MEDIUM_DEVICE = "GPU"  # the wire name of accelerator memory; consumers know GPU, CPU and STORAGE only


@dataclass(frozen=True)
class BlockStored:
    """A run of adjacent full blocks of one request became hits. All tuples of blocks have one entry per block."""

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None  # of the block before the run; None at the start of a sequence
    token_ids: tuple[int, ...]  # len(block_hashes) * block_size
    block_size: int
    lora_id: int | None = None  # the adapter's number; superseded by lora_name, but consumers read it
    lora_name: str | None = None
    medium: str = MEDIUM_DEVICE
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None  # None: no block has any
    group_idx: int = 0
    kind: str = "full_attention"
    sliding_window: int | None = None


@dataclass(frozen=True)
class BlockRemoved:
    """Blocks are no longer hits. A hash that another block still holds is removed once per block."""

    block_hashes: tuple[BlockHash, ...]
    medium: str = MEDIUM_DEVICE
    group_idx: int = 0


@dataclass(frozen=True)
class AllBlocksCleared:
    """No block is a hit any more."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventLog:
    """The events of all pools of a manager, in the order in which they happened.

    One log for all pools: `AllBlocksCleared` voids the blocks of every pool, so a consumer must not read it after what
    another pool stored since.
    """

    def __init__(self) -> None:
        self._events: list[KVCacheEvent] = []

    def extend(self, events: Iterable[KVCacheEvent]) -> None:
        """Adds events, oldest first."""
        self._events += events

    def note_cleared(self) -> None:
        """Adds an `AllBlocksCleared`, once if several pools are cleared together."""
        if not self._events or not isinstance(self._events[-1], AllBlocksCleared):
            self._events.append(AllBlocksCleared())

    @property
    def waiting(self) -> tuple[KVCacheEvent, ...]:
        """The events that the next `take` returns."""
        return tuple(self._events)

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call, oldest first."""
        events, self._events = self._events, []
        return events


@dataclass(frozen=True)
class GroupInfo:
    """What events say about a KV-cache group: its block size in tokens, its attention kind and window."""

    block_size: int
    kind: str = "full_attention"
    sliding_window: int | None = None


class StoredRequest(Protocol):
    """What events read of a request."""

    @property
    def token_ids(self) -> np.ndarray:
        """int32[num_tokens]."""

    @property
    def lora(self) -> LoRARequest | None:
        """The adapter, if any."""

    @property
    def has_extra_keys(self) -> bool:
        """Whether anything beside tokens decides the request's hashes."""

    def event_extra_keys(self, first_block: int, end_block: int, block_size: int) -> Sequence[tuple[Any, ...] | None]:
        """Extra keys of the blocks [first_block, end_block), in the form of events."""


def stored_events(
    request: StoredRequest,
    block_hashes: Sequence[BlockHash],  # of the request at the group's block size
    stored: np.ndarray,  # int64[k], ascending indices of the request's blocks
    group_id: int,
    group: GroupInfo,
) -> list[BlockStored]:
    """One event per run of adjacent blocks."""
    if not len(stored):
        return []
    runs = np.split(stored, np.flatnonzero(np.diff(stored) != 1) + 1)
    return [_stored_run(request, block_hashes, int(run[0]), int(run[-1]) + 1, group_id, group) for run in runs]


def _stored_run(
    request: StoredRequest, block_hashes: Sequence[BlockHash], first: int, end: int, group_id: int, group: GroupInfo
) -> BlockStored:
    size = group.block_size
    return BlockStored(
        block_hashes=tuple(block_hashes[first:end]),
        parent_block_hash=block_hashes[first - 1] if first else None,
        token_ids=tuple(request.token_ids[first * size : end * size].tolist()),
        block_size=size,
        lora_id=None if request.lora is None else request.lora.adapter_id,
        lora_name=None if request.lora is None else request.lora.name,
        extra_keys=tuple(request.event_extra_keys(first, end, size)) if request.has_extra_keys else None,
        group_idx=group_id,
        kind=group.kind,
        sliding_window=group.sliding_window,
    )

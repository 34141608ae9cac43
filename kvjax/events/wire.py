"""The messages of KV events as they stand in msgpack: the fields of vLLM in vLLM's order.

Flow:    kvjax.core.watch.kv_events -> EventEncoder -> [wire] -> bytes -> EventDecoder -> [wire] -> a consumer
Source:  vLLM 0.33 distributed/kv_events.py; the array form is what vLLM sent before its pull request 42892

    batch        [ts, events, data_parallel_rank]            always an array of three
    event, map   {"type": "BlockStored", field: value, ...}  fields that are None by default are left out
    event, array ["BlockStored", value, ...]                 every field, in the order below

Fields of vLLM that this library has no value for (locality, ownership, session_id, lookahead_token_ids) come after
these and are left out, which is what vLLM does with them by default; a decoder passes over them.

Other engines and older releases send fewer fields, either form, and events of other types: `read_batch` takes those.

Importing this module needs msgspec; `EventEncoder` and `EventDecoder` import it on first use.
"""

from __future__ import annotations

from typing import Any

import msgspec

ExternalBlockHash = int | bytes  # the low 64 bits of a digest, or the digest


class BlockStored(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False, frozen=True):
    """Blocks became hits. Lists of blocks have one entry per block."""

    block_hashes: list[ExternalBlockHash]
    parent_block_hash: ExternalBlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True, gc=False, frozen=True):
    """Blocks are no longer hits."""

    block_hashes: list[ExternalBlockHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", gc=False, frozen=True):
    """No block is a hit any more."""


class BlockStoredArray(BlockStored, tag="BlockStored", array_like=True, frozen=True):
    """`BlockStored` in the array form."""


class BlockRemovedArray(BlockRemoved, tag="BlockRemoved", array_like=True, frozen=True):
    """`BlockRemoved` in the array form."""


class AllBlocksClearedArray(AllBlocksCleared, tag="AllBlocksCleared", array_like=True, frozen=True):
    """`AllBlocksCleared` in the array form."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The events of one step of one data-parallel rank, oldest first."""

    ts: float  # seconds since the epoch
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class ArrayEventBatch(EventBatch, array_like=True, frozen=True):
    """`EventBatch` of events in the array form."""

    ts: float
    events: list[BlockStoredArray | BlockRemovedArray | AllBlocksClearedArray]  # type: ignore[assignment]
    data_parallel_rank: int | None = None


EVENTS: dict[Any, type[Event]] = {
    "BlockStored": BlockStored,
    "BlockRemoved": BlockRemoved,
    "AllBlocksCleared": AllBlocksCleared,
}
NUM_SURE_FIELDS = 7  # of the array form: what stands behind differs from release to release


def read_batch(payload: bytes) -> tuple[EventBatch, list[str]]:
    """A batch of events in either form, and the types of those left out since they are none of `EVENTS`.

    Fields that an event lacks are None, if they may be.

    Raises:
        msgspec.MsgspecError: it is no batch, or a field is missing or of another type.
        ValueError, TypeError, LookupError, RecursionError: it is no batch.
    """
    ts, events, *rest = msgspec.msgpack.decode(payload, type=list[Any])
    known: list[Event] = []
    others: list[str] = []
    for event in events:
        tag = event["type"] if isinstance(event, dict) else msgspec.convert(event, list[Any])[0]
        if tag in EVENTS:
            known.append(_read(EVENTS[tag], event))
        else:
            others.append(repr(tag))
    rank = msgspec.convert(rest[0], int | None) if rest else None
    return EventBatch(msgspec.convert(ts, float), known, rank), others


def _read(kind: type[Event], event: dict[str, Any] | list[Any]) -> Event:
    if isinstance(event, dict):
        return _of_fields(kind, event)
    names = kind.__struct_fields__
    try:
        return _of_fields(kind, dict(zip(names, event[1:], strict=False)))
    except msgspec.ValidationError:
        return _of_fields(kind, dict(zip(names[:NUM_SURE_FIELDS], event[1:], strict=False)))


def _of_fields(kind: type[Event], fields: dict[str, Any]) -> Event:
    tagged = dict.fromkeys(kind.__struct_fields__) | fields | {"type": kind.__struct_config__.tag}
    return msgspec.convert(tagged, kind)

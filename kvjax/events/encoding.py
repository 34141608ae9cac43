"""KV events of a step as msgpack bytes, and back.

Flow:    KVCacheManager.take_events -> [EventEncoder] -> payload -> ZmqEventPublisher
         payload -> [EventDecoder] -> wire.EventBatch -> a consumer
Source:  vLLM 0.33 distributed/kv_events.py, v1/core/kv_cache_utils.py (maybe_convert_block_hash)

Hashes go out as the low 64 bits of the digest by default, as vLLM's do: Dynamo reads integers only, llm-d reads both
and takes the last 8 bytes of a digest, which is the same number. Whole digests are for consumers that compare them
with digests of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kvjax.core.watch.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from kvjax.extras import require_extra

if TYPE_CHECKING:
    from kvjax.events import wire

EVENT_FORMS = ("map", "array")

logger = logging.getLogger(__name__)


def low_64_bits(block_hash: bytes) -> int:
    """The last 8 bytes of a digest as a big-endian number: what vLLM and its consumers call the hash of a block."""
    return int.from_bytes(block_hash[-8:], "big")


class EventEncoder:
    """Events as bytes. Not thread-safe; a step of 64 one-block events costs about 0.1 ms."""

    def __init__(self, event_form: str = "map", int_block_hashes: bool = True) -> None:
        """An encoder.

        Args:
            event_form: "map" (vLLM 0.33) or "array" (vLLM before its pull request 42892).
            int_block_hashes: hashes as their low 64 bits, otherwise as whole digests.

        Raises:
            ValueError: there is no such form.
            MissingExtraError: msgspec is not installed.
        """
        _check_form(event_form)
        msgspec = require_extra("msgspec", "events", "encoding KV events")
        from kvjax.events import wire

        is_map = event_form == "map"
        self._pack: Callable[[object], bytes] = msgspec.msgpack.Encoder().encode
        self._batch = wire.EventBatch
        self._stored = wire.BlockStored if is_map else wire.BlockStoredArray
        self._removed = wire.BlockRemoved if is_map else wire.BlockRemovedArray
        self._cleared = wire.AllBlocksCleared() if is_map else wire.AllBlocksClearedArray()
        self._hash: Callable[[bytes], int | bytes] = low_64_bits if int_block_hashes else bytes

    def encode(self, events: Iterable[KVCacheEvent], ts: float, data_parallel_rank: int | None = None) -> bytes:
        """One batch: the events in order, the time in seconds since the epoch and the rank that they are of."""
        return self._pack(self._batch(ts, [self._message(event) for event in events], data_parallel_rank))

    def _message(self, event: KVCacheEvent) -> wire.Event:
        if isinstance(event, BlockStored):
            return self._stored_message(event)
        if isinstance(event, BlockRemoved):
            return self._removed(list(map(self._hash, event.block_hashes)), event.medium, event.group_idx)
        return self._cleared

    def _stored_message(self, event: BlockStored) -> wire.BlockStored:
        parent = event.parent_block_hash
        return self._stored(  # by position: half the time of names
            list(map(self._hash, event.block_hashes)),
            None if parent is None else self._hash(parent),
            event.token_ids,  # type: ignore[arg-type]
            event.block_size,
            event.lora_id,
            event.medium,
            event.lora_name,
            event.extra_keys,  # type: ignore[arg-type]
            event.group_idx,
            event.kind,
            event.sliding_window,
        )


class EventDecoder:
    """Bytes as events, those of vLLM and SGLang too, of any release. Not thread-safe.

    Batches in the form and with the fields of today's vLLM take 12 us for 64 blocks, others some times as long. Fields
    unknown here are passed over, and so are events of other types than the three, with one warning.
    """

    def __init__(self, event_form: str = "map") -> None:
        """A decoder of both forms; one of `event_form` is faster.

        Raises:
            ValueError: there is no such form.
            MissingExtraError: msgspec is not installed.
        """
        _check_form(event_form)
        msgspec = require_extra("msgspec", "events", "decoding KV events")
        from kvjax.events import wire

        batch = wire.EventBatch if event_form == "map" else wire.ArrayEventBatch
        self._unpack: Callable[[bytes], wire.EventBatch] = msgspec.msgpack.Decoder(batch).decode
        self._read = wire.read_batch
        self._bad = (msgspec.MsgspecError, ValueError, TypeError, LookupError, RecursionError)
        self._has_warned = False

    def decode(self, payload: bytes) -> wire.EventBatch:
        """The batch.

        Raises:
            ValueError: the bytes are no batch of events, or an event of a known type cannot be read.
        """
        try:
            return self._unpack(payload)
        except self._bad:
            return self._decode_other(payload)

    def _decode_other(self, payload: bytes) -> wire.EventBatch:
        try:
            batch, unknown = self._read(payload)
        except self._bad as error:
            raise ValueError(f"expected a batch of KV events, got {len(payload)} other bytes: {error}") from error
        if unknown and not self._has_warned:
            self._has_warned = True
            logger.warning("KV events: events of types unknown here are passed over, the first is %s", unknown[0])
        return batch


def _check_form(event_form: str) -> None:
    if event_form not in EVENT_FORMS:
        raise ValueError(f"expected event_form of {', '.join(EVENT_FORMS)}, got {event_form!r}")

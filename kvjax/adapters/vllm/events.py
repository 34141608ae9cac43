"""KV events of kvjax as those of vLLM's classes, which its publishers encode.

Flow:    kvjax.core events -> [EventClasses.translate] -> vLLM's BlockStored, BlockRemoved, AllBlocksCleared
"""

from __future__ import annotations

from typing import Any

from kvjax.adapters.vllm.description import vllm_module
from kvjax.adapters.vllm.release import Release
from kvjax.core.watch.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent

KINDS = {"rswa": "full_attention"}  # kinds whose name in vLLM's events is another


class EventClasses:
    """The event classes of the installed vLLM, with the fields that its release has."""

    def __init__(self, release: Release) -> None:
        module = vllm_module("vllm.distributed.kv_events")
        self._stored, self._removed, self._cleared = module.BlockStored, module.BlockRemoved, module.AllBlocksCleared
        self._shorten = vllm_module("vllm.v1.core.kv_cache_utils").maybe_convert_block_hash
        self._stored_fields = frozenset(release.description["events"]["BlockStored"])
        self._removed_fields = frozenset(release.description["events"]["BlockRemoved"])

    def translate(self, event: KVCacheEvent) -> Any:
        """One event."""
        if isinstance(event, AllBlocksCleared):
            return self._cleared()
        hashes = [self._shorten(block_hash) for block_hash in event.block_hashes]
        if isinstance(event, BlockRemoved):
            return self._make(
                self._removed, self._removed_fields, block_hashes=hashes, medium=event.medium, group_idx=event.group_idx
            )
        assert isinstance(event, BlockStored)
        parent = event.parent_block_hash
        return self._make(
            self._stored,
            self._stored_fields,
            block_hashes=hashes,
            parent_block_hash=None if parent is None else self._shorten(parent),
            token_ids=list(event.token_ids),
            block_size=event.block_size,
            lora_id=event.lora_id,
            medium=event.medium,
            lora_name=event.lora_name,
            extra_keys=[None] * len(hashes) if event.extra_keys is None else list(event.extra_keys),
            group_idx=event.group_idx,
            kv_cache_spec_kind=KINDS.get(event.kind, event.kind),
            kv_cache_spec_sliding_window=event.sliding_window,
        )

    @staticmethod
    def _make(cls: Any, fields: frozenset[str], **values: Any) -> Any:
        return cls(**{name: value for name, value in values.items() if name in fields})


__all__ = ["EventClasses"]

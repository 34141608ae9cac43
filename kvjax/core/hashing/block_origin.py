"""Under which salt, adapter and weight version a request's blocks are computed.

Flow:    Request -> [BlockOrigin] -> BlockOrigins of a pool, SeenOrigins, `KVCacheManager.invalidate`
"""

from __future__ import annotations

from dataclasses import dataclass

from kvjax.core.hashing.extra_keys import LoRARequest


@dataclass(frozen=True)
class BlockOrigin:
    """What a block's KV depends on beside the prompt's content."""

    cache_salt: str | None = None
    lora: LoRARequest | None = None
    weight_version: int | str | None = None

"""Under which salts, adapters and weight versions the first block of a prompt was looked up lately.

Flow:    MissReasons -> [SeenOrigins] -> origins whose blocks of the same tokens LookupStates looks for

A hash says nothing of the salt in it. So first blocks are remembered by the hash that they have without salt, adapter
and weight version, each with the last `MAX_ORIGINS` origins that it came with: some 300 bytes an origin.
"""

from __future__ import annotations

from kvjax.core.hashing.block_hash import BlockHash
from kvjax.core.hashing.block_origin import BlockOrigin
from kvjax.core.requests.request import Request

MAX_ORIGINS = 4
NO_ORIGIN = BlockOrigin()


class SeenOrigins:
    """Origins of the `max_prefixes` first blocks that were looked up last. A call hashes at most one block."""

    def __init__(self, max_prefixes: int) -> None:
        self._max_prefixes = max_prefixes
        self._origins: dict[BlockHash, list[BlockOrigin]] = {}  # latest last, in both

    def meet(self, request: Request) -> list[BlockOrigin]:
        """The other origins that the request's first block came with; its own is remembered if it registers blocks."""
        first_blocks = _first_block_without_origin(request)
        if not first_blocks:
            return []
        (first_block,) = first_blocks
        origins = self._origins.get(first_block, [])
        others = [origin for origin in origins if origin != request.origin]
        if not request.skip_writing_prefix_cache:
            self._origins.pop(first_block, None)
            self._origins[first_block] = [*others, request.origin][-MAX_ORIGINS:]
            if len(self._origins) > self._max_prefixes:
                del self._origins[next(iter(self._origins))]
        return others


def _first_block_without_origin(request: Request) -> list[BlockHash]:
    """The hash of its first block; none if it is shorter, or has no hasher."""
    if request.origin == NO_ORIGIN:
        return request.block_hashes[:1]
    return request.block_hashes_under(NO_ORIGIN, max_blocks=1)

"""What a cache that never evicts would hit: the ceiling that a replay is measured against.

Flow:    TraceRequest in order -> [InfiniteCache.lookup_and_add] -> hit tokens

The longest prefix that a prompt shares with any earlier one is found on hash ids. For every id, which stands for a
whole prefix, `_seen` keeps the longest stretch of tokens up to its end that was presented: less than the end of its
block where the prompt was cut inside. A hit is that prefix in full cache blocks, and at least one token is computed.
"""

from __future__ import annotations

from kvjax.replay.requests.trace import TraceRequest


class InfiniteCache:
    """Prefixes seen so far. A lookup costs a few dictionary accesses per hash id."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._seen: dict[int, int] = {}  # hash id -> tokens of its prefix that were presented

    def lookup_and_add(self, request: TraceRequest) -> int:
        """Hit tokens of the prompt, a multiple of the block size; afterwards the prompt is cached."""
        shared = min(self._shared_tokens(request), request.input_length - 1)
        self._add(request)
        return shared // self.block_size * self.block_size

    def _shared_tokens(self, request: TraceRequest) -> int:
        end = shared = 0
        for hash_id in request.hash_ids:
            end += request.hash_block_size
            shared = max(shared, self._seen.get(hash_id, 0))
            if shared < end:
                break
        return shared

    def _add(self, request: TraceRequest) -> None:
        full, rest = divmod(request.input_length, request.hash_block_size)
        for index, hash_id in enumerate(request.hash_ids[:full]):
            self._seen[hash_id] = (index + 1) * request.hash_block_size
        if rest:
            last = request.hash_ids[-1]
            self._seen[last] = max(self._seen.get(last, 0), request.input_length)

"""Requests with tokens and block hashes out of a trace, each repeated prefix hashed once.

Flow:    TraceRequest -> [PromptMaker.make] -> Request with block_hashes -> KVCacheManager

Hashing is most of what a replay without a model costs, and a trace repeats its prefixes. The hashes of one trace block
depend on its tokens and on the hash before it only, so they are kept under (hash before, hash id) for as long as the
trace will name the id again. What the managers do with the hashes is not affected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from kvjax.core.hashing.block_hash import BlockHash, BlockHasher
from kvjax.core.requests.request import Request
from kvjax.replay.trace import TRACE_BLOCK_SIZE, TraceRequest


class PromptMaker:
    """Makes the requests of one trace, each trace request at most once."""

    def __init__(self, trace: Iterable[TraceRequest], hasher: BlockHasher) -> None:
        self.hasher = hasher
        self.on_made: Callable[[TraceRequest, list[BlockHash]], object] = lambda source, block_hashes: None
        self._uses_left = Counter(hash_id for request in trace for hash_id in request.hash_ids)
        self._known: dict[tuple[BlockHash | None, int], list[BlockHash]] = {}

    def make(self, request_id: str, source: TraceRequest) -> Request:
        """The request, not yet known to any manager."""
        tokens = source.token_ids()
        if TRACE_BLOCK_SIZE % self.hasher.block_size:
            return Request(request_id, tokens, block_hasher=self.hasher)
        request = Request(request_id, tokens)
        request.block_hashes += self._hash_prompt(source, tokens)
        request.block_hasher = self.hasher
        self.on_made(source, request.block_hashes)
        return request

    def _hash_prompt(self, source: TraceRequest, tokens: np.ndarray) -> list[BlockHash]:
        """Hashes of the full blocks: remembered ones first, then all others in one call."""
        blocks_per_id = TRACE_BLOCK_SIZE // self.hasher.block_size
        num_blocks = source.input_length // self.hasher.block_size
        hashes: list[BlockHash] = []
        num_known = 0
        for hash_id in source.hash_ids:
            known = self._known.get((hashes[-1] if hashes else None, hash_id))
            if known is None:
                break
            hashes += known
            if len(known) < blocks_per_id:
                break
            num_known += 1
        del hashes[num_blocks:]
        start = len(hashes) * self.hasher.block_size
        hashes += self.hasher.hash_tokens(tokens[start:], hashes[-1] if hashes else None)
        self._remember(source, hashes, num_known, blocks_per_id)
        return hashes

    def _remember(self, source: TraceRequest, hashes: list[BlockHash], first: int, blocks_per_id: int) -> None:
        """Keeps the hashes of ids that come again, from trace block `first` on, and drops those that do not."""
        for index, hash_id in enumerate(source.hash_ids):
            self._uses_left[hash_id] -= 1
            begin = index * blocks_per_id
            key = (hashes[begin - 1] if begin else None, hash_id)
            if not self._uses_left[hash_id]:
                self._known.pop(key, None)
            elif index >= first:  # what came before is known in full
                hashes_of_id = hashes[begin : begin + blocks_per_id]
                if len(hashes_of_id) > len(self._known.get(key, ())):
                    self._known[key] = hashes_of_id

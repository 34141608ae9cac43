"""Requests with tokens and block hashes out of a trace, each repeated prefix hashed once.

Flow:    TraceRequest -> [PromptMaker.make] -> Request with block_hashes -> KVCacheManager

Hashing is most of what a replay without a model costs, and a trace repeats its prefixes. The hashes of one trace block
are those of the cache blocks that end in it. An id stands for a whole prefix, so they are kept under it for as long as
the trace will name it again. What the managers do with the hashes is not affected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvjax.core.hashing.block_hash import BlockHash, BlockHasher
from kvjax.core.requests.request import Request
from kvjax.replay.requests.trace import TraceRequest


class PromptMaker:
    """Makes the requests of one trace, each trace request at most once."""

    def __init__(self, trace: Iterable[TraceRequest], hasher: BlockHasher) -> None:
        self.hasher = hasher
        self.on_made: Callable[[TraceRequest, list[BlockHash]], object] = lambda source, block_hashes: None
        self._uses_left = Counter(hash_id for request in trace for hash_id in request.hash_ids)
        self._known: dict[int, list[BlockHash]] = {}

    def make(self, request_id: str, source: TraceRequest) -> Request:
        """The request, not yet known to any manager."""
        tokens = source.token_ids()
        request = Request(request_id, tokens)
        request.block_hashes += self._hash_prompt(source, tokens)
        request.block_hasher = self.hasher
        self.on_made(source, request.block_hashes)
        return request

    def _hash_prompt(self, source: TraceRequest, tokens: np.ndarray) -> list[BlockHash]:
        """Hashes of the full blocks: remembered ones first, then all others in one call."""
        ends = self._block_ends(source)
        hashes: list[BlockHash] = []
        num_known = 0
        for hash_id, end in zip(source.hash_ids, ends, strict=True):
            hashes += self._known.get(hash_id, ())
            if len(hashes) < end:
                break
            num_known += 1
        del hashes[source.input_length // self.hasher.block_size :]
        start = len(hashes) * self.hasher.block_size
        hashes += self.hasher.hash_tokens(tokens[start:], hashes[-1] if hashes else None)
        self._remember(source, hashes, num_known, ends)
        return hashes

    def _block_ends(self, source: TraceRequest) -> list[int]:
        """How many cache blocks end in the tokens of each hash id or before."""
        num_tokens = np.arange(1, len(source.hash_ids) + 1) * source.hash_block_size
        return (num_tokens // self.hasher.block_size).tolist()

    def _remember(self, source: TraceRequest, hashes: list[BlockHash], first: int, ends: Sequence[int]) -> None:
        """Keeps the hashes of ids that come again, from trace block `first` on, and drops those that do not."""
        for index, hash_id in enumerate(source.hash_ids):
            self._uses_left[hash_id] -= 1
            if not self._uses_left[hash_id]:
                self._known.pop(hash_id, None)
            elif index >= first:  # what came before is known in full
                hashes_of_id = hashes[ends[index - 1] if index else 0 : ends[index]]
                if len(hashes_of_id) > len(self._known.get(hash_id, ())):
                    self._known[hash_id] = hashes_of_id

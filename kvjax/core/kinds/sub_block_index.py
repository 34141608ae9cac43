"""Which cached blocks go on from a prefix, and with which tokens: to reuse the first part of one of them.

Flow:    SingleTypeKVCacheManager.cache_blocks -> [SubBlockIndex] -> SubBlockHits.find
Source:  ARCHITECTURE.md, "Hits inside blocks"

Blocks that continue one prefix with equal extra keys (salt, adapter, multimodal items ... of the whole block) are
siblings. They are kept sorted by their tokens, so those that begin like a given block stand around its place: the
nearer, the more tokens in common.

No lookup hits a block in the step that registers it. So new entries wait until the next step starts: a lookup passes
over all of them at once, however many prompts with one beginning a step admits.

Entries outlive their blocks: the prefix index says whether a hash is still cached. Once there are twice as many as
hashed blocks, those of blocks that are gone are dropped.

Invariant (`check_invariants`):

    S1  siblings are sorted and distinct; with the entries that wait they are `num_entries`, and every cached block of
        the groups is among them
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from heapq import merge
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax.errors import InvariantError

if TYPE_CHECKING:
    from kvjax.core.hashing.block_hash import BlockHash
    from kvjax.core.pool.block_pool import BlockPool
    from kvjax.core.requests.request import Request

NO_PARENT = b""
LEAST_ENTRIES = 64
TOKENS = np.dtype(">i4")  # big-endian: bytes sort as the tokens do

Prefix = tuple[bytes, Any]  # hash of the block before, extra keys
Sibling = tuple[bytes, "BlockHash"]  # the block's `TOKENS`, its hash


class SubBlockIndex:
    """The registered blocks of one manager's groups by what they continue.

    Costs about 3 us and 300 bytes a block; a lookup as much for each sibling that it yields.
    """

    def __init__(self, block_size: int, pool: BlockPool, group_ids: Sequence[int]) -> None:
        self._block_size = block_size
        self._pool = pool
        self._group_ids = tuple(group_ids)
        self._siblings: dict[Prefix, list[Sibling]] = {}
        self._waiting: list[tuple[Prefix, Sibling]] = []  # of this step
        self.num_entries = 0

    def add(self, request: Request, block_hashes: Sequence[BlockHash], first: int, end: int) -> None:
        """Notes the request's full blocks `first` to `end`, which were just registered."""
        for column in range(first, end):
            sibling = (self._tokens(request, column, self._block_size), block_hashes[column])
            self._waiting.append((self._prefix(request, block_hashes, column), sibling))
        self.num_entries += end - first
        if self.num_entries > 2 * self._pool.num_hashed_blocks + LEAST_ENTRIES:
            self._drop_gone()

    def new_step_starts(self) -> None:
        """Lets lookups find what earlier steps registered. About 2 us for each new block."""
        for prefix, sibling in self._waiting:
            siblings = self._siblings.setdefault(prefix, [])
            place = bisect_left(siblings, sibling)
            if siblings[place : place + 1] == [sibling]:
                self.num_entries -= 1
            else:
                siblings.insert(place, sibling)
        self._waiting.clear()

    def clear(self) -> None:
        """Forgets everything, as the pool does when its prefix cache is reset."""
        self._siblings.clear()
        self._waiting.clear()
        self.num_entries = 0

    def find(
        self, request: Request, block_hashes: Sequence[BlockHash], column: int, num_tokens: int, least: int = 1
    ) -> Iterator[tuple[int, BlockHash]]:
        """Blocks that could stand for the first tokens of the request's block `column`, the best first.

        Yields:
            (tokens in common, `least` to `num_tokens`; hash).
        """
        siblings = self._siblings.get(self._prefix(request, block_hashes, column))
        if siblings is None:
            return
        tokens = self._tokens(request, column, num_tokens)
        place = bisect_left(siblings, (tokens,))
        before, after = range(place - 1, -1, -1), range(place, len(siblings))
        outward = (((_num_common(tokens, siblings[i][0]), siblings[i][1]) for i in side) for side in (before, after))
        for num_common, block_hash in merge(*outward, key=lambda found: -found[0]):
            if num_common < least:
                return
            yield num_common, block_hash

    def check_invariants(self) -> None:
        """Raises InvariantError if S1 does not hold."""
        known = {block_hash for siblings in self._siblings.values() for _, block_hash in siblings}
        known |= {block_hash for _, (_, block_hash) in self._waiting}
        num_entries = sum(map(len, self._siblings.values())) + len(self._waiting)
        cached = {block_hash for hash_map in self._hash_maps() for block_hash in hash_map.snapshot()}
        is_sorted = all(siblings == sorted(set(siblings)) for siblings in self._siblings.values())
        if not is_sorted or num_entries != self.num_entries or not cached <= known:
            raise InvariantError(f"S1, groups {self._group_ids}: {len(cached - known)} cached blocks are missing")

    def _prefix(self, request: Request, block_hashes: Sequence[BlockHash], column: int) -> Prefix:
        """What the request's block `column` continues."""
        hasher, start = request.block_hasher, column * self._block_size
        first = NO_PARENT if hasher is None else hasher.none_hash  # requests of unlike hashers share nothing
        parent = block_hashes[column - 1] if column else first
        return parent, request.extra_keys_of_block(start, start + self._block_size)

    def _tokens(self, request: Request, column: int, num_tokens: int) -> bytes:
        start = column * self._block_size
        return request.token_ids[start : start + num_tokens].astype(TOKENS).tobytes()

    def _hash_maps(self) -> list[Any]:
        return [self._pool.hash_maps[group_id] for group_id in self._group_ids]

    def _drop_gone(self) -> None:
        maps = self._hash_maps()

        def is_cached(sibling: Sibling) -> bool:
            return any(sibling[1] in hash_map for hash_map in maps)

        self._siblings = {p: left for p, siblings in self._siblings.items() if (left := [*filter(is_cached, siblings)])}
        self._waiting = [(prefix, sibling) for prefix, sibling in self._waiting if is_cached(sibling)]
        self.num_entries = sum(map(len, self._siblings.values())) + len(self._waiting)


def _num_common(ours: bytes, theirs: bytes) -> int:
    """Tokens up to the first difference; `theirs` are not fewer."""
    tokens = np.frombuffer(ours, TOKENS)
    differs = (np.frombuffer(theirs, TOKENS, tokens.size) != tokens).nonzero()[0]
    return differs.item(0) if differs.size else tokens.size


__all__ = ["SubBlockIndex"]

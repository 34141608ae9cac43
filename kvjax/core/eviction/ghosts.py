"""Evicted blocks that go on being counted: the run that each was of, found again by the hash of the foremost.

Flow:    RunKeeper.note_eviction -> [Ghosts.add] -> a prompt comes back: [claim] -> its run and how much of it

What was evicted of a run at once is a piece: its hashes, in the order of the prompt. A run loses its last blocks first.
So the first block that a returning prompt lacks is the foremost of a piece, and where the piece ends the next one
begins: there is a lookup for each piece, and none for a block. Beyond `max_blocks` blocks the oldest pieces go.
"""

from __future__ import annotations

from collections import OrderedDict

from kvjax.core.hashing.block_hash import BlockHash
from kvjax.errors import InvariantError


class Ghosts:
    """The pieces of one pool. About 1 us a piece, and 10 ns and 80 bytes a block."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.num_blocks = 0
        # Run and hashes of each piece, by its group and first hash, the oldest one first.
        self._pieces: OrderedDict[tuple[int, BlockHash], tuple[int, list[BlockHash]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pieces)

    def add(self, group: int, run: int, hashes: list[BlockHash]) -> list[tuple[int, int]]:
        """Remembers a piece; the runs that lose remembered blocks over it, and how many each."""
        key, lost = (group, hashes[0]), []
        if key in self._pieces:
            lost.append(self._removed(*self._pieces.pop(key)))
        self._pieces[key] = run, hashes
        self.num_blocks += len(hashes)
        while self.num_blocks > self.max_blocks:
            _, oldest = self._pieces.popitem(last=False)
            lost.append(self._removed(*oldest))
        return lost

    def _removed(self, run: int, hashes: list[BlockHash]) -> tuple[int, int]:
        self.num_blocks -= len(hashes)
        return run, len(hashes)

    def claim(self, group: int, hashes: list[BlockHash], start: int) -> tuple[int, int, list[BlockHash]]:
        """Forgets the piece that begins with `hashes[start]`: its run, 0 where there is none.

        Hashes chain, so what comes back of a piece is its beginning: how many blocks, and the hashes of the rest.
        """
        if not self.remembers(group, hashes[start]):
            return 0, 0, []
        run, remembered = self._pieces.pop((group, hashes[start]))
        self._removed(run, remembered)
        count = num_equal(remembered, hashes[start : start + len(remembered)])
        return run, count, remembered[count:]

    def remembers(self, group: int, first_hash: BlockHash | None) -> bool:
        """Whether a piece begins with a hash."""
        return (group, first_hash) in self._pieces

    def blocks_by_run(self) -> dict[int, int]:
        """Remembered blocks of each run."""
        found: dict[int, int] = {}
        for run, hashes in self._pieces.values():
            found[run] = found.get(run, 0) + len(hashes)
        return found

    def state(self) -> tuple[object, ...]:
        """The pieces, oldest first."""
        return tuple((group, run, tuple(hashes)) for (group, _), (run, hashes) in self._pieces.items())

    def check_invariants(self) -> None:
        """Raises InvariantError if blocks are counted wrongly, or there are too many."""
        if sum(self.blocks_by_run().values()) != self.num_blocks or self.num_blocks > self.max_blocks:
            raise InvariantError(f"{self.num_blocks} remembered blocks are counted, of at most {self.max_blocks}")


def num_equal(some: list[BlockHash], others: list[BlockHash]) -> int:
    """Leading hashes that are equal."""
    if some == others:
        return len(some)
    pairs = zip(some, others, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(some), len(others)))


__all__ = ["Ghosts"]

"""Evicted blocks that go on being counted: the run that each was of, found again by the hash of the foremost.

Flow:    RunKeeper.note_eviction -> [Ghosts.add] -> a prompt comes back: [claim] -> its run and how much of it

What was evicted of a run at once is a piece: its hashes, in the order of the prompt. A run loses its last blocks first.
So the first block that a returning prompt lacks is the foremost of a piece, and where the piece ends the next one
begins: there is a lookup for each piece, and none for a block. Beyond `max_blocks` blocks the oldest pieces go.
"""

from __future__ import annotations

from collections import deque

from kvjax.core.hashing.block_hash import BlockHash
from kvjax.errors import InvariantError

Piece = list  # [group, run, hashes]


class Ghosts:
    """The pieces of one pool. About 1 us a piece, and 10 ns and 80 bytes a block."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.num_blocks = 0
        self._pieces: dict[int, dict[BlockHash, Piece]] = {}  # by group and first hash
        self._order: deque[Piece] = deque()  # oldest first; some are no pieces any more

    def __len__(self) -> int:
        return sum(map(len, self._pieces.values()))

    def add(self, group: int, run: int, hashes: list[BlockHash]) -> list[tuple[int, int]]:
        """Remembers a piece; the runs that lose remembered blocks over it, and how many each."""
        of_group = self._pieces.setdefault(group, {})
        lost = [self._remove(of_group[hashes[0]])] if hashes[0] in of_group else []
        piece = [group, run, hashes]
        of_group[hashes[0]] = piece
        self._order.append(piece)
        self.num_blocks += len(hashes)
        while self.num_blocks > self.max_blocks:
            if self._is_remembered(oldest := self._order.popleft()):
                lost.append(self._remove(oldest))
        if len(self._order) > 64 and len(self._order) > 2 * len(self):
            self._order = deque(filter(self._is_remembered, self._order))
        return lost

    def claim(self, group: int, hashes: list[BlockHash], start: int) -> tuple[int, int, list[BlockHash]]:
        """Forgets the piece that begins with `hashes[start]`: its run, 0 where there is none.

        Hashes chain, so what comes back of a piece is its beginning: how many blocks, and the hashes of the rest.
        """
        piece = self._pieces.get(group, {}).get(hashes[start])
        if piece is None:
            return 0, 0, []
        _, run, remembered = piece
        self._remove(piece)
        count = num_equal(remembered, hashes[start : start + len(remembered)])
        return run, count, remembered[count:]

    def remembers(self, group: int, first_hash: BlockHash | None) -> bool:
        """Whether a piece begins with a hash."""
        return group in self._pieces and first_hash in self._pieces[group]

    def _is_remembered(self, piece: Piece) -> bool:
        group, _, hashes = piece
        return self._pieces[group].get(hashes[0]) is piece

    def _remove(self, piece: Piece) -> tuple[int, int]:
        group, run, hashes = piece
        del self._pieces[group][hashes[0]]
        self.num_blocks -= len(hashes)
        return run, len(hashes)

    def blocks_by_run(self) -> dict[int, int]:
        """Remembered blocks of each run."""
        found: dict[int, int] = {}
        for of_group in self._pieces.values():
            for _, run, hashes in of_group.values():
                found[run] = found.get(run, 0) + len(hashes)
        return found

    def state(self) -> tuple[Piece, ...]:
        """The pieces, oldest first."""
        return tuple(filter(self._is_remembered, self._order))

    def check_invariants(self) -> None:
        """Raises InvariantError if blocks are counted wrongly, or a piece is in no order."""
        if sum(self.blocks_by_run().values()) != self.num_blocks or self.num_blocks > self.max_blocks:
            raise InvariantError(f"{self.num_blocks} remembered blocks are counted, of at most {self.max_blocks}")
        if sum(map(self._is_remembered, self._order)) != len(self):
            raise InvariantError("a remembered piece has no place in the order")


def num_equal(some: list[BlockHash], others: list[BlockHash]) -> int:
    """Leading hashes that are equal."""
    if some == others:
        return len(some)
    pairs = zip(some, others, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(some), len(others)))


__all__ = ["Ghosts"]

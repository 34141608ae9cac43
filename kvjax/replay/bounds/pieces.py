"""A trace as a tree of pieces: stretches of tokens that prompts have whole or not at all.

Flow:    TraceRequest list -> [PromptTree.of] -> free_exchange, clairvoyant

A hash id stands for a whole prefix. It is cut wherever a prompt ends, one token before (what that prompt can hit), and
at multiples of `checkpoint_tokens`:

    hash ids     | 0 ........... | 1 ............ |
    a prompt     | ..................... |x|         x: its last token, which it computes
    pieces       | 0             | 1     |2| 3    |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvjax.core.kinds.retention import DEFAULT_TOKENS
from kvjax.replay.requests.trace import TraceRequest

CHECKPOINT_TOKENS = DEFAULT_TOKENS
ROOT = -1  # the parent of first pieces


@dataclass(frozen=True)
class PromptTree:
    """Pieces by number; of each its parent, and the tokens of the prefix up to its end."""

    parents: list[int]
    ends: list[int]
    paths: list[tuple[int, ...]]  # the pieces of each prompt
    num_hittable: list[int]  # of each prompt's pieces, those before its last token
    prompt_tokens: int  # of all prompts
    checkpoint_tokens: int

    @classmethod
    def of(cls, trace: Sequence[TraceRequest], checkpoint_tokens: int = CHECKPOINT_TOKENS) -> PromptTree:
        """The tree of a trace."""
        ends_of_id = _ends_by_id(trace, checkpoint_tokens)
        numbers: dict[tuple[int, int], int] = {}  # (hash id, end) -> piece
        tree = cls([], [], [], [], sum(request.input_length for request in trace), checkpoint_tokens)
        for request in trace:
            pieces = [
                (hash_id, end)
                for hash_id in request.hash_ids
                for end in ends_of_id[hash_id]
                if end <= request.input_length
            ]
            tree._add(pieces, numbers)
        return tree

    def _add(self, pieces: Iterable[tuple[int, int]], numbers: dict[tuple[int, int], int]) -> None:
        path: list[int] = []
        for piece in pieces:
            number = numbers.setdefault(piece, len(self.ends))
            if number == len(self.ends):
                self.parents.append(path[-1] if path else ROOT)
                self.ends.append(piece[1])
            path.append(number)
        self.paths.append(tuple(path))
        self.num_hittable.append(len(path) - 1)

    def size(self, piece: int) -> int:
        """Tokens of a piece."""
        return self.ends[piece] - self.start(piece)

    def start(self, piece: int) -> int:
        """Tokens before a piece."""
        parent = self.parents[piece]
        return 0 if parent == ROOT else self.ends[parent]


def _ends_by_id(trace: Sequence[TraceRequest], checkpoint_tokens: int) -> dict[int, list[int]]:
    """Where the pieces of each hash id end, ascending, in tokens from the start of the prompt."""
    ends: dict[int, set[int]] = {}
    for request in trace:
        size, length = request.hash_block_size, request.input_length
        for index, hash_id in enumerate(request.hash_ids):
            start = index * size
            end = min(start + size, length)
            of_id = ends.setdefault(hash_id, set())
            of_id.update(range(-(-(start + 1) // checkpoint_tokens) * checkpoint_tokens, end, checkpoint_tokens))
            of_id.add(end)
            if end == length and end - 1 > start:
                of_id.add(end - 1)
    return {hash_id: sorted(of_id) for hash_id, of_id in ends.items()}


__all__ = ["CHECKPOINT_TOKENS", "ROOT", "PromptTree"]

"""What LRU hits where states, windows and tokens exchange all bytes: no pools, no blocks, one order.

Flow:    PromptTree, CacheCosts, bytes -> [free_exchange] -> hit tokens

One prompt after another: looked up, computed, kept. A hit of n tokens needs every token before n, and a checkpoint at n
of the kinds that forget. Checkpoints are kept at the end of every prompt, at the hit, where the prompt parts from what
is cached, and at multiples of the tree's `checkpoint_tokens` on probation: evicted before all else until they are hit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

from kvjax.replay.bounds.costs import CacheCosts, CheckpointBytes
from kvjax.replay.bounds.pieces import PromptTree


def free_exchange(tree: PromptTree, costs: CacheCosts, memory_bytes: float) -> int:
    """Hit tokens of all prompts."""
    cache, hit_tokens = _Cache(tree, costs), 0
    for path, num_hittable in zip(tree.paths, tree.num_hittable, strict=True):
        hit_tokens += cache.serve(path, num_hittable)
        cache.evict(memory_bytes)
    return hit_tokens


class _Cache:
    """Pieces, and the checkpoints behind them as `~piece`, each in the order of their last use."""

    def __init__(self, tree: PromptTree, costs: CacheCosts) -> None:
        self._tree = tree
        self._bytes_per_token = costs.bytes_per_token
        self._forgets = bool(costs.forgetful)
        self._checkpoints = CheckpointBytes(tree, costs.forgetful)
        self._token_bytes = 0.0
        self._lasting: OrderedDict[int, None] = OrderedDict()
        self._on_probation: OrderedDict[int, None] = OrderedDict()

    def serve(self, path: Sequence[int], num_hittable: int) -> int:
        """Looks a prompt up and keeps it; hit tokens."""
        lasting = self._lasting
        num_shared = sum(1 for _ in takewhile(lasting.__contains__, path[:num_hittable]))
        num_hit = num_shared
        while self._forgets and num_hit and not self._has_checkpoint(path[num_hit - 1]):
            num_hit -= 1
        for piece in reversed(path):
            self._keep(piece, lasting)
        if self._forgets:
            self._keep_checkpoints(path, {num_hit, num_shared, num_hittable})
        return self._tree.ends[path[num_hit - 1]] if num_hit else 0

    def _has_checkpoint(self, piece: int) -> bool:
        return ~piece in self._lasting or ~piece in self._on_probation

    def _keep_checkpoints(self, path: Sequence[int], own: set[int]) -> None:
        """Keeps checkpoints behind so many pieces for good, and others at multiples on probation."""
        for num in range(max(own), min(own), -1):
            piece = path[num - 1]
            if not self._tree.ends[piece] % self._tree.checkpoint_tokens and ~piece not in self._lasting:
                self._keep(~piece, self._on_probation)
        for num in sorted(own - {0}):
            self._keep(~path[num - 1], self._lasting)

    def _keep(self, item: int, where: OrderedDict[int, None]) -> None:
        """Makes an item the last to go."""
        if item in where:
            where.move_to_end(item)
            return
        if item in self._on_probation:
            del self._on_probation[item]
        elif item < 0:
            self._checkpoints.add(~item)
        else:
            self._token_bytes += self._tree.size(item) * self._bytes_per_token
        where[item] = None

    def evict(self, memory_bytes: float) -> None:
        """Until what is kept fits."""
        while self._token_bytes + self._checkpoints.used > memory_bytes and (self._on_probation or self._lasting):
            item, _ = (self._on_probation or self._lasting).popitem(last=False)
            if item < 0:
                self._checkpoints.remove(~item)
            else:
                self._token_bytes -= self._tree.size(item) * self._bytes_per_token


__all__ = ["free_exchange"]

"""What prefixes cost in bytes: tokens where every one is kept, and what a hit needs of kinds that forget.

Flow:    KVCachePlan -> [CacheCosts.of] -> PromptTree -> [CheckpointBytes] -> free_exchange, clairvoyant

Every kind says itself which tokens no later token sees (`skipped_tokens`). So a checkpoint at L tokens costs

    a window of W     the W - 1 tokens before L
    chunks            the tokens of the chunk up to L
    recurrent states  one state, which stands for the one token before L

What two checkpoints both need is there once. Bytes are those of one device's pages, padding included. The first tokens
that windows with sinks keep are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvjax.core.kinds.single_type_manager import SingleTypeKVCacheManager
from kvjax.core.manager.kv_cache_manager import KVCacheManager
from kvjax.core.spec import KVCacheConfig
from kvjax.planning import KVCachePlan
from kvjax.replay.bounds.pieces import ROOT, PromptTree


@dataclass(frozen=True)
class ForgetfulCache:
    """A cache of which a hit needs the end alone."""

    bytes_per_token: float  # of recurrent states: the bytes of one
    count_skipped: Callable[[np.ndarray], np.ndarray]  # of int64[n] lengths of hits the tokens that none of them needs


@dataclass(frozen=True)
class CacheCosts:
    """What a model's caches cost."""

    bytes_per_token: float  # in all caches that keep every token
    forgetful: tuple[ForgetfulCache, ...] = ()

    @classmethod
    def of(cls, plan: KVCachePlan, hash_block_size: int) -> CacheCosts:
        """The costs of a plan's caches. Kinds without a prefix cache cost nothing."""
        managers = KVCacheManager(plan.config, plan.max_model_len, hash_block_size).groups.cacheable
        caches = [(manager.kv_cache_spec, _bytes_per_token(manager, plan.config)) for manager in managers]
        return cls(
            sum(per_token for spec, per_token in caches if not spec.forgets),
            tuple(ForgetfulCache(per_token, spec.skipped_tokens) for spec, per_token in caches if spec.forgets),
        )

    def without_checkpoints(self) -> CacheCosts:
        """The same if nothing were forgotten, at the same bytes a token."""
        return CacheCosts(self.bytes_per_token)


def _bytes_per_token(manager: SingleTypeKVCacheManager, config: KVCacheConfig) -> float:
    """Over all layers of a manager's groups."""
    groups = [config.kv_cache_groups[group_id] for group_id in manager.group_ids]
    columns = [config.pools[group.pool_id].columns[: len(group.layer_names)] for group in groups]
    block_bytes = sum(column.page_bytes for of_group in columns for column in of_group)
    return block_bytes if manager.kv_cache_spec.state_pages is not None else block_bytes / manager.block_size


@dataclass
class CheckpointBytes:
    """Bytes of the checkpoints that are kept, at ends of pieces. A call costs some microseconds a cache and piece."""

    tree: PromptTree
    caches: Sequence[ForgetfulCache]
    used: float = 0.0
    # Per cache and piece, how many checkpoints need the piece from each token on, up to its end.
    _starts: list[dict[int, dict[int, int]]] = field(init=False)
    # Per cache and piece: tokens that a hit up to the piece does not need.
    _skipped: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        ends = np.array(self.tree.ends, np.int64)
        self._starts = [{} for _ in self.caches]
        self._skipped = [cache.count_skipped(ends).tolist() for cache in self.caches]

    def add(self, piece: int) -> None:
        """A checkpoint behind a piece is kept, once more."""
        self._change(piece, 1)

    def remove(self, piece: int) -> None:
        """A checkpoint behind a piece is kept once less."""
        self._change(piece, -1)

    def _change(self, last: int, change: int) -> None:
        tree = self.tree
        for cache, starts_of, skipped in zip(self.caches, self._starts, self._skipped, strict=True):
            piece, first, num_tokens = last, skipped[last], 0
            while piece != ROOT and tree.ends[piece] > first:
                starts, end = starts_of.setdefault(piece, {}), tree.ends[piece]
                num_tokens -= end - min(starts, default=end)
                start = max(first, tree.start(piece))
                starts[start] = starts.get(start, 0) + change
                if not starts[start]:
                    del starts[start]
                num_tokens += end - min(starts, default=end)
                piece = tree.parents[piece]
            self.used += num_tokens * cache.bytes_per_token


__all__ = ["CacheCosts", "CheckpointBytes", "ForgetfulCache"]

"""Bytes of tokens and checkpoints by the definition: sets of tokens, each a number of a prefix and its place."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvjax.replay.bounds import CacheCosts, ForgetfulCache, PromptTree
from kvjax.replay.bounds.pieces import ROOT


def window(size: int, bytes_per_token: int) -> ForgetfulCache:
    return ForgetfulCache(bytes_per_token, lambda lengths: np.maximum(lengths - (size - 1), 0))


def chunks(size: int, bytes_per_token: int) -> ForgetfulCache:
    return ForgetfulCache(bytes_per_token, lambda lengths: lengths // size * size)


def state(num_bytes: int) -> ForgetfulCache:
    return window(2, num_bytes)  # the token before a checkpoint stands for it


COSTS = {
    "full": CacheCosts(3),
    "window": CacheCosts(3, (window(40, 5),)),
    "chunks": CacheCosts(3, (chunks(96, 5),)),
    "states": CacheCosts(3, (state(500),)),
    "all": CacheCosts(2, (window(40, 5), window(700, 1), chunks(96, 4), state(300))),
    "windows alone": CacheCosts(0, (window(100, 4),)),
}


def path_to(tree: PromptTree, piece: int) -> list[int]:
    """A piece and those before it, the first one first."""
    path: list[int] = []
    while piece != ROOT:
        path.insert(0, piece)
        piece = tree.parents[piece]
    return path


def tokens_of(tree: PromptTree, piece: int) -> set[tuple[int, int]]:
    """Tokens of the prefix up to the end of a piece: the piece of each, and its place."""
    return {(one, place) for one in path_to(tree, piece) for place in range(tree.start(one), tree.ends[one])}


def checkpoint_bytes(tree: PromptTree, costs: CacheCosts, checkpoints: Iterable[int]) -> float:
    """Of checkpoints behind pieces, what they share counted once."""
    total = 0.0
    for cache in costs.forgetful:
        needed: set[tuple[int, int]] = set()
        for piece in checkpoints:
            skipped = cache.count_skipped(np.array([tree.ends[piece]])).item()
            needed |= {token for token in tokens_of(tree, piece) if token[1] >= skipped}
        total += len(needed) * cache.bytes_per_token
    return total

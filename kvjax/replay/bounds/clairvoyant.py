"""What a cache hits that knows the trace, and keeps what is used again soonest.

Flow:    PromptTree, CacheCosts, bytes -> [clairvoyant] -> hit tokens
Source:  Belady: A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5(2), 1966

Each later prompt is a wish: the longest prefix that it shares with what has come by now, and for kinds that forget a
checkpoint behind the last piece of it. Bytes go to the wishes that are granted soonest; when they are short the latest
wish gives up its tail. A token belongs to one wish at a time, that of the next prompt that has it:

    prompts        t           s1           s2
    0 .. a         computed -> hit by s1 -> hit by s2
    a .. b         computed --------------> hit by s2

Where every token is kept (full attention) this is Belady's rule for tokens, and no cache hits more. Where kinds forget
a checkpoint may stand anywhere in a prompt, hit or computed, which favours it; but whether a wish is worth its bytes is
not asked, so other choices may hit more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil

from kvjax.replay.bounds.costs import CacheCosts, CheckpointBytes
from kvjax.replay.bounds.pieces import ROOT, PromptTree


def clairvoyant(tree: PromptTree, costs: CacheCosts, memory_bytes: float) -> int:
    """Hit tokens of all prompts."""
    wishes, hit_tokens = _Wishes(tree, costs), 0
    for prompt, next_uses in enumerate(_next_uses(tree)):
        hit_tokens += wishes.grant(prompt)
        for later, first, end in next_uses:
            wishes.extend(later, first, end)
        wishes.shrink(memory_bytes)
    return hit_tokens


def _next_uses(tree: PromptTree) -> list[list[tuple[int, int, int]]]:
    """Which prompt has the tokens from `first` to `end - 1` of each prompt next, as (that prompt, first, end)."""
    next_uses: list[list[tuple[int, int, int]]] = [[] for _ in tree.paths]
    last_user: dict[int, int] = {}
    for prompt, (path, num_hittable) in enumerate(zip(tree.paths, tree.num_hittable, strict=True)):
        for user, first, end in _runs([last_user.get(piece, -1) for piece in path[:num_hittable]]):
            if user >= 0:
                next_uses[user].append((prompt, tree.start(path[first]), tree.ends[path[end - 1]]))
        last_user.update(dict.fromkeys(path, prompt))
    return next_uses


def _runs(values: list[int]) -> Iterator[tuple[int, int, int]]:
    """Each stretch of equal values: the value, where it begins and ends."""
    first = 0
    for index in range(1, len(values) + 1):
        if index == len(values) or values[index] != values[first]:
            yield values[first], first, index
            first = index


@dataclass
class _Wish:
    """What one later prompt finds: its first `num_tokens`, of which it owns some ranges, deepest first."""

    num_tokens: int = 0
    checkpoint: int = ROOT  # the last piece that is found whole
    owned: deque[tuple[int, int]] = field(default_factory=deque)


class _Wishes:
    """What all later prompts want that find something by now."""

    def __init__(self, tree: PromptTree, costs: CacheCosts) -> None:
        self._tree = tree
        self._bytes_per_token = costs.bytes_per_token
        self._forgets = bool(costs.forgetful)
        self._checkpoints = CheckpointBytes(tree, costs.forgetful)
        self._num_owned = 0  # tokens
        self._of: dict[int, _Wish] = {}
        self._latest: list[int] = []  # heap of negated prompts: those of `_of`, and some that are not there any more

    def extend(self, prompt: int, first: int, end: int) -> None:
        """A later prompt owns its tokens from `first` to `end - 1`: they are there, and nobody has them sooner."""
        wish = self._of.get(prompt)
        if wish is None:
            wish = self._of[prompt] = _Wish()
            heappush(self._latest, -prompt)
        if wish.num_tokens < end:
            self._set_length(prompt, wish, end)
        wish.owned.append((first, end))
        self._num_owned += end - first

    def grant(self, prompt: int) -> int:
        """A prompt comes; hit tokens. What it owned is nobody's."""
        wish = self._of.pop(prompt, None)
        if wish is None:
            return 0
        self._num_owned -= sum(end - first for first, end in wish.owned)
        last_hit = self._tree.ends[wish.checkpoint] if wish.checkpoint != ROOT else 0
        hit_tokens = last_hit if self._forgets else wish.num_tokens
        self._set_length(prompt, wish, 0)
        return hit_tokens

    def shrink(self, memory_bytes: float) -> None:
        """Lets the tails of the latest wishes go until the others fit."""
        while self._of and (excess := self._used_bytes - memory_bytes) > 0:
            prompt = -self._latest[0]
            wish = self._of.get(prompt)
            if wish is None:
                heappop(self._latest)
                continue
            first, end = wish.owned.popleft()
            cut = min(ceil(excess / self._bytes_per_token), end - first) if self._bytes_per_token else end - first
            self._num_owned -= cut
            if first < end - cut:
                wish.owned.appendleft((first, end - cut))
            self._set_length(prompt, wish, end - cut if wish.owned else 0)
            if not wish.owned:
                del self._of[prompt]

    @property
    def _used_bytes(self) -> float:
        return self._num_owned * self._bytes_per_token + self._checkpoints.used

    def _set_length(self, prompt: int, wish: _Wish, num_tokens: int) -> None:
        """Moves the end of what is found, and the checkpoint."""
        wish.num_tokens = num_tokens
        if not self._forgets:
            return
        path, ends = self._tree.paths[prompt], self._tree.ends
        whole = bisect_right(path, num_tokens, key=ends.__getitem__)
        checkpoint = path[whole - 1] if whole else ROOT
        if checkpoint != wish.checkpoint:
            if wish.checkpoint != ROOT:
                self._checkpoints.remove(wish.checkpoint)
            if checkpoint != ROOT:
                self._checkpoints.add(checkpoint)
            wish.checkpoint = checkpoint


__all__ = ["clairvoyant"]

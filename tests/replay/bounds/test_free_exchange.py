"""One LRU over all bytes, against lists and sets; without bounds on memory it is the infinite cache."""

from __future__ import annotations

import pytest

from kvjax.replay import TraceRequest
from kvjax.replay.bounds import CacheCosts, PromptTree, free_exchange
from kvjax.replay.bounds.infinite_cache import InfiniteCache
from kvjax.replay.requests.trace import cut_tails
from tests.replay.bounds.naive_bytes import COSTS, checkpoint_bytes, state
from tests.replay.random_traces import random_trace

Item = tuple[str, int]  # "tokens" or "checkpoint", the piece


def naive_hits(tree: PromptTree, costs: CacheCosts, memory_bytes: float) -> int:
    """The definition: two lists, oldest first, and bytes counted anew."""
    lasting: list[Item] = []
    on_probation: list[Item] = []

    def keep(item: Item, where: list[Item]) -> None:
        for kept in (lasting, on_probation):
            if item in kept:
                kept.remove(item)
        where.append(item)

    def used_bytes() -> float:
        items = lasting + on_probation
        tokens = sum(tree.size(piece) for what, piece in items if what == "tokens")
        kept = [piece for what, piece in items if what == "checkpoint"]
        return tokens * costs.bytes_per_token + checkpoint_bytes(tree, costs, kept)

    hit_tokens = 0
    for path, num_hittable in zip(tree.paths, tree.num_hittable, strict=True):
        cached = [("tokens", piece) in lasting for piece in path[:num_hittable]]
        shared = [*cached, False].index(False)
        hit = shared
        while costs.forgetful and hit and ("checkpoint", path[hit - 1]) not in lasting + on_probation:
            hit -= 1
        hit_tokens += tree.ends[path[hit - 1]] if hit else 0
        for piece in reversed(path):
            keep(("tokens", piece), lasting)
        if costs.forgetful:
            for piece in reversed(path[hit:num_hittable]):
                if tree.ends[piece] % tree.checkpoint_tokens == 0 and ("checkpoint", piece) not in lasting:
                    keep(("checkpoint", piece), on_probation)
            for num in sorted({hit, shared, num_hittable} - {0}):
                keep(("checkpoint", path[num - 1]), lasting)
        while used_bytes() > memory_bytes:
            (on_probation or lasting).pop(0)
    return hit_tokens


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("seed", range(2))
def test_agrees_with_lists(name: str, seed: int) -> None:
    """Traces whose prompts are cut anywhere, and at whole hash blocks."""
    for trace in (random_trace(seed, 16, hash_block_size=256), cut_tails(random_trace(seed, 16, hash_block_size=256))):
        tree = PromptTree.of(trace)
        for memory_bytes in (0, 3_000, 12_000):
            assert free_exchange(tree, COSTS[name], memory_bytes) == naive_hits(tree, COSTS[name], memory_bytes)


@pytest.mark.parametrize("name", COSTS)
def test_with_room_for_all_it_hits_what_whole_hash_blocks_share(name: str) -> None:
    trace = cut_tails(random_trace(0, 60))
    infinite = InfiniteCache(1)
    expected = sum(infinite.lookup_and_add(request) for request in trace)
    assert free_exchange(PromptTree.of(trace), COSTS[name], float("inf")) == expected > 0


@pytest.mark.parametrize(
    ("prompts", "num_states", "hit_tokens"),
    [
        (((0, 1), (4, 5), (0, 2)), 4, 512),
        (((0, 1), (4, 5), (0, 2)), 3, 0),  # the one behind block 0 was the oldest on probation
        (((0, 1), (0, 2), (4, 5), (0, 3)), 4, 512 + 512),  # a hit took it off probation: that behind block 4 goes
    ],
)
def test_a_checkpoint_on_probation_goes_first_until_it_is_hit(
    prompts: tuple[tuple[int, int], ...], num_states: int, hit_tokens: int
) -> None:
    """Prompts of two blocks leave a state on probation, and one at their end; tokens cost nothing."""
    trace = cut_tails([TraceRequest(0, 1_024, 0, ids) for ids in prompts])
    costs = CacheCosts(0, (state(7),))
    assert free_exchange(PromptTree.of(trace), costs, 7 * num_states) == hit_tokens

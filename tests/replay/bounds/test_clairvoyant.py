"""Who knows the future: against every choice of what to keep on small traces, and above all policies."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest

from kvjax.core.eviction import EVICTION_POLICIES
from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.replay import ReplayConfig, run_replay
from kvjax.replay.bounds import CacheCosts, PromptTree, clairvoyant, free_exchange
from kvjax.replay.bounds.clairvoyant import _Wishes
from kvjax.replay.bounds.infinite_cache import InfiniteCache
from kvjax.replay.bounds.pieces import ROOT
from kvjax.replay.requests.trace import TraceRequest
from tests.replay.bounds.naive_bytes import COSTS, checkpoint_bytes, state, window
from tests.replay.random_traces import random_trace


def most_hit_tokens(trace: list[TraceRequest], num_tokens: int) -> int:
    """The best of all choices of at most `num_tokens` tokens to keep after each prompt; a token is its prefix."""
    prompts = [request.token_ids().tolist() for request in trace]

    @cache
    def best(number: int, kept: frozenset[tuple[int, ...]]) -> int:
        if number == len(prompts):
            return 0
        prefixes = [tuple(prompts[number][: end + 1]) for end in range(len(prompts[number]))]
        hit = [*(prefix in kept for prefix in prefixes[:-1]), False].index(False)
        later = {tuple(prompt[: end + 1]) for prompt in prompts[number + 1 :] for end in range(len(prompt))}
        useful = (kept | set(prefixes)) & later
        choices = combinations(sorted(useful), min(num_tokens, len(useful)))
        return hit + max(best(number + 1, frozenset(choice)) for choice in choices)

    return best(0, frozenset())


@pytest.mark.parametrize("num_tokens", [1, 3, 5, 8])
def test_no_choice_of_tokens_hits_more(num_tokens: int) -> None:
    """Full attention; prompts of up to 6 tokens, cut anywhere in hash blocks of 2."""
    for seed in range(10):
        trace = random_trace(seed, 6, max_blocks=3, hash_block_size=2)
        found = clairvoyant(PromptTree.of(trace), CacheCosts(7), 7 * num_tokens)
        assert found == most_hit_tokens(trace, num_tokens)


NEVER = (-1, -1)


def beladys_hits(trace: list[TraceRequest], num_tokens: int) -> int:
    """Belady's rule for tokens, a token being its prefix: what is used again last goes first, of equals the deeper.

    The last token of a prompt is computed, so what comes next as that is of no use until then.
    """
    prompts = [
        [(hash_id, place) for hash_id in request.hash_ids for place in range(request.hash_block_size)]
        for request in trace
    ]
    prompts = [prompt[: request.input_length] for prompt, request in zip(prompts, trace, strict=True)]
    kept: set[tuple[int, int]] = set()
    hit_tokens = 0
    for number, prompt in enumerate(prompts):
        hit_tokens += [*(token in kept for token in prompt[:-1]), False].index(False)
        next_use: dict[tuple[int, int], tuple[int, int]] = {}  # token -> prompt, depth
        for later, other in enumerate(prompts[number + 1 :]):
            for depth, token in enumerate(other):
                next_use.setdefault(token, (later, depth) if depth + 1 < len(other) else NEVER)
        useful = [token for token in kept | set(prompt) if next_use.get(token, NEVER) != NEVER]
        kept = set(sorted(useful, key=next_use.__getitem__)[:num_tokens])
    return hit_tokens


@pytest.mark.parametrize("seed", range(6))
def test_full_attention_is_beladys_rule_for_tokens(seed: int) -> None:
    trace = random_trace(seed, 40, hash_block_size=8)
    for num_tokens in (5, 20, 45, 80, 150):
        found = clairvoyant(PromptTree.of(trace), CacheCosts(3), 3 * num_tokens)
        assert found == beladys_hits(trace, num_tokens)


def test_a_prefix_without_its_checkpoint_is_no_hit() -> None:
    """Of 9 tokens that could be hit 5 fit beside a state, but no prompt ends there."""
    tree = PromptTree.of([TraceRequest(0, 10, 0, (0,), hash_block_size=10)] * 2)
    costs = CacheCosts(1, (state(100),))
    assert clairvoyant(tree, costs, 105) == 0
    assert clairvoyant(tree, costs, 109) == 9


@pytest.mark.parametrize("seed", range(6))
def test_what_is_kept_fits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes by their definition: of the tokens that some prompt owns, and of a checkpoint for each of these prompts."""
    tree = PromptTree.of(random_trace(seed, 60, hash_block_size=4))
    costs, shrink = CacheCosts(1, (window(2, 3),)), _Wishes.shrink

    def shrink_and_count(wishes: _Wishes, memory_bytes: float) -> None:
        shrink(wishes, memory_bytes)
        kept = wishes._of.values()
        assert all(wish.owned and all(first < end for first, end in wish.owned) for wish in kept)
        tokens = sum(end - first for wish in kept for first, end in wish.owned)
        checkpoints = {wish.checkpoint for wish in kept} - {ROOT}
        used = tokens + checkpoint_bytes(tree, costs, checkpoints)
        assert used == wishes._used_bytes <= memory_bytes

    monkeypatch.setattr(_Wishes, "shrink", shrink_and_count)
    for memory_bytes in (5, 20, 60):
        clairvoyant(tree, costs, memory_bytes)


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_no_policy_hits_more(policy: str, seed: int) -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype="bfloat16")
    trace = random_trace(seed, 60)
    tree = PromptTree.of(trace)
    for num_blocks in (200, 400, 900):
        config = ReplayConfig({"layers.0": spec}, num_blocks=num_blocks, serial=True, eviction_policy=policy)
        result = run_replay(trace, config)
        most = clairvoyant(tree, CacheCosts.of(result.plan, 16), result.plan.used_bytes)
        assert most >= result.recorder.hit_tokens > 0


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("hash_block_size", [48, 512])
def test_with_room_for_all_it_is_the_infinite_cache(name: str, hash_block_size: int) -> None:
    """Without room it hits nothing."""
    trace = random_trace(2, 60, hash_block_size=hash_block_size)
    infinite = InfiniteCache(1)
    expected = sum(infinite.lookup_and_add(request) for request in trace)
    assert clairvoyant(PromptTree.of(trace), COSTS[name], float("inf")) == expected > 0
    assert clairvoyant(PromptTree.of(trace), COSTS[name], 0) == 0


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("seed", range(4))
def test_checkpoints_never_help(name: str, seed: int) -> None:
    """What is not forgotten costs nothing more; and on these traces the future is worth more than the past."""
    tree = PromptTree.of(random_trace(seed, 80, hash_block_size=128))
    for memory_bytes in (2_000, 8_000, 30_000):
        found = clairvoyant(tree, COSTS[name], memory_bytes)
        assert free_exchange(tree, COSTS[name], memory_bytes) <= found
        assert found <= clairvoyant(tree, COSTS[name].without_checkpoints(), memory_bytes)

"""Prompts with a common beginning on hybrids as deployed: from the third on all hit it, to the block."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvjax.configs import load_model_config
from kvjax.core import BlockHasher, KVCacheManager, Request
from kvjax.planning import plan_kv_cache
from kvjax.planning.states.deployed_specs import deployed_specs
from kvjax.planning.states.state_blocks import STATE_BLOCK_SIZE

MODELS = (
    "qwen3-next-80b-a3b",
    "kimi-linear-48b-a3b",
    "granite-4.0-h-small",
    "nemotron-3-nano-30b-a3b",
    "jamba-1.5-mini",
)
PROMPTS = ((1_600, 600), (1_500, 700), (480, 72), (300, 1_900))  # vLLM issue 45238, short system prompts
NUM_PROMPTS, NUM_ANSWER, DRAFTS, MAX_LEN = 64, 20, 2, 4_096
HASHER = BlockHasher(16, "xxhash_cbor", seed="0")


def manager_of(model: str, use_eagle: bool, max_len: int = MAX_LEN) -> KVCacheManager:
    own = load_model_config(model).kv_cache_specs()
    specs = deployed_specs(own, state_block_size=STATE_BLOCK_SIZE, idle_state_dtype=None)
    if use_eagle:
        specs = {
            name: spec if spec.state_pages is None else replace(spec, num_speculative_blocks=DRAFTS)
            for name, spec in specs.items()
        }
    plan = plan_kv_cache(specs, max_model_len=max_len, memory_bytes=40 * 10**9, platform="tpu")
    return KVCacheManager(plan.config, max_len, 16, use_eagle=use_eagle)


def run(manager: KVCacheManager, request: Request) -> int:
    """Computed, answered and freed; the tokens of its hit."""
    blocks, hit = manager.get_computed_blocks(request)
    count = manager.limit_step(request, request.num_tokens - hit, hit, blocks)
    assert manager.allocate_slots(request, count, hit, blocks) is not None
    request.num_computed_tokens = hit + count
    for token in [None] * 9 + [7] * NUM_ANSWER:
        manager.new_step_starts()
        left = request.num_tokens - request.num_computed_tokens
        if not left and token is not None:
            request.append_output_token_ids(token)
            left = 1
        if left:
            count = manager.limit_step(request, left)
            assert manager.allocate_slots(request, count) is not None
            request.num_computed_tokens += count
    assert request.num_output_tokens == NUM_ANSWER
    manager.free(request)
    return hit


@pytest.mark.parametrize("use_eagle", [False, True], ids=["", "eagle"])
@pytest.mark.parametrize(("num_shared", "num_own"), PROMPTS)
@pytest.mark.parametrize("model", MODELS)
def test_all_but_the_first_two_hit_what_they_share(model: str, num_shared: int, num_own: int, use_eagle: bool) -> None:
    """The first computes it, the second finds its tokens and leaves a state there. EAGLE drops a block of a hit."""
    manager, rng = manager_of(model, use_eagle), np.random.default_rng(num_shared)
    shared = rng.integers(0, 50_000, num_shared).tolist()
    prompts = [shared + rng.integers(0, 50_000, num_own).tolist() for _ in range(NUM_PROMPTS)]
    hits = [run(manager, Request(f"r{i}", prompt, block_hasher=HASHER)) for i, prompt in enumerate(prompts)]
    longest = num_shared // 16 * 16 - 16 * use_eagle
    assert hits == [0, 0] + [longest] * (NUM_PROMPTS - 2)


@pytest.mark.parametrize("use_eagle", [False, True], ids=["", "eagle"])
@pytest.mark.parametrize(("num_shared", "num_own"), PROMPTS)
@pytest.mark.parametrize("model", MODELS)
def test_all_but_the_first_hit_what_it_names(model: str, num_shared: int, num_own: int, use_eagle: bool) -> None:
    manager, rng = manager_of(model, use_eagle), np.random.default_rng(num_shared)
    shared = rng.integers(0, 50_000, num_shared).tolist()
    prompts = [shared + rng.integers(0, 50_000, num_own).tolist() for _ in range(8)]
    hits = [
        run(manager, Request(f"r{i}", prompt, block_hasher=HASHER, checkpoints=[num_shared]))
        for i, prompt in enumerate(prompts)
    ]
    longest = (num_shared - 16 * use_eagle) // 16 * 16
    assert hits == [0] + [longest] * 7


@pytest.mark.parametrize("use_eagle", [False, True], ids=["", "eagle"])
@pytest.mark.parametrize("num_shared", [2_047, 2_048, 2_100, 4_095, 4_113, 9_000, 16_384, 20_000])
def test_the_second_prompt_hits_half_of_what_it_shares(num_shared: int, use_eagle: bool) -> None:
    """From 2,048 tokens on: a power of two of them, though nobody knew where the prompts part."""
    manager, rng = manager_of(MODELS[0], use_eagle, 24_576), np.random.default_rng(num_shared)
    shared = rng.integers(0, 50_000, num_shared).tolist()
    prompts = [shared + rng.integers(0, 50_000, 3_000).tolist() for _ in range(2)]
    hits = [run(manager, Request(f"r{i}", prompt, block_hasher=HASHER)) for i, prompt in enumerate(prompts)]
    longest = num_shared - 16 * use_eagle
    assert hits == [0, 1 << (longest.bit_length() - 1) if longest >= 2_048 else 0]

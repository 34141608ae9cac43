"""A small DeepSeek V4, planned by the general rules and run by the general managers: hits are right for all tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvjax.configs import load_model_config
from kvjax.core import BlockHasher, KVCacheBlocks, KVCacheManager, Request
from kvjax.core.hashing.block_hash import BlockHash
from kvjax.models.configs.deepseek_v4 import CompressionConfig, DeepseekV4Config
from kvjax.planning import CacheShape, KVCachePlan, Parallelism, plan_kv_cache

HASH_BLOCK_SIZE = 4  # the smallest block of any table
MAX_MODEL_LEN = 2_048
STEP_TOKENS = 512
MODELS = {
    "pools_as_in_flash": (0, 4, 128, 4, 128),  # windows and compressed caches in pools of their own
    "windows_beside_compressed": (0, 4, 128, 4),  # two tables of windows fit the columns of ratio 4
}
HASHER = BlockHasher(HASH_BLOCK_SIZE, "xxhash_cbor", seed="0")


def small_v4(name: str) -> DeepseekV4Config:
    """Flash with few layers."""
    config = load_model_config("deepseek-v4-flash")
    assert isinstance(config, DeepseekV4Config)
    compression = {
        0: None,
        4: CompressionConfig(ratio=4, is_indexed=True),
        128: CompressionConfig(ratio=128, is_indexed=False),
    }
    ratios = MODELS[name]
    return replace(config, num_layers=len(ratios), compression=tuple(compression[ratio] for ratio in ratios))


def planned(name: str, num_requests: int) -> KVCachePlan:
    """Pools that hold `num_requests` longest requests and the tokens of a step."""
    specs = small_v4(name).kv_cache_specs()
    arguments = {"max_model_len": MAX_MODEL_LEN, "max_in_flight_tokens": STEP_TOKENS}
    shape = CacheShape.of(specs, platform="cpu", parallel=Parallelism())
    needs = shape.needs(MAX_MODEL_LEN, MAX_MODEL_LEN, STEP_TOKENS)
    sizes = [1 + need.in_flight_blocks + num_requests * need.request_blocks for need in needs]
    return plan_kv_cache(specs, num_blocks=sizes, **arguments)


def manager_of(plan: KVCachePlan) -> KVCacheManager:
    return KVCacheManager(plan.config, MAX_MODEL_LEN, HASH_BLOCK_SIZE, max_in_flight_tokens=STEP_TOKENS)


def cached_columns(manager: KVCacheManager, hashes: Sequence[BlockHash], group_id: int) -> np.ndarray:
    """bool[k] whether the pool has the group's block k of the prompt."""
    group = manager.kv_cache_config.kv_cache_groups[group_id]
    of_blocks = manager.groups.hashing.of_block_size(hashes, group.kv_cache_spec.block_size)
    pool = manager.block_pools[group.pool_id]
    return np.array([pool.find_run([block_hash], group_id, 1).size == 1 for block_hash in of_blocks], bool)


def needed_columns(manager: KVCacheManager, group_id: int, length: int) -> range:
    """The group's blocks that a token after `length` tokens reads."""
    spec = manager.kv_cache_config.kv_cache_groups[group_id].kv_cache_spec
    window = getattr(spec, "sliding_window", None)
    first = 0 if window is None else max(0, length - window + 1)
    return range(first // spec.block_size, length // spec.block_size)


def longest_hit(manager: KVCacheManager, request: Request) -> int:
    """Every length is tried in every table."""
    groups = range(len(manager.kv_cache_config.kv_cache_groups))
    cached = [cached_columns(manager, request.block_hashes, group_id) for group_id in groups]
    lengths = range((request.num_tokens - 1) // 256 * 256, 0, -256)
    fits = [n for n in lengths if all(cached[g][list(needed_columns(manager, g, n))].all() for g in groups)]
    return fits[0] if fits else 0


def run(manager: KVCacheManager, request: Request, hit_blocks: KVCacheBlocks | None, hit: int) -> bool:
    """Computes the request a step at a time; False if it does not fit, when its blocks are given back."""
    step = min(STEP_TOKENS, request.num_tokens - hit)
    if manager.allocate_slots(request, step, hit, hit_blocks) is None:
        return False
    request.num_computed_tokens = hit + step
    while (left := request.num_tokens - request.num_computed_tokens) > 0:
        step = min(STEP_TOKENS, left)
        if manager.allocate_slots(request, step) is None:
            manager.free(request)
            return False
        request.num_computed_tokens += step
        manager.check_invariants()
    return True


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(4))
def test_hits_are_the_longest_that_all_tables_have(name: str, seed: int) -> None:
    """Prompts grow out of each other in pools of three requests, so that windows of one are evicted before those of
    another, and each is looked up as it comes.
    """
    rng = np.random.default_rng(seed)
    manager = manager_of(planned(name, 3))
    trunks = [rng.integers(0, 50_000, MAX_MODEL_LEN).tolist() for _ in range(2)]
    running: list[Request] = []
    hits, limited = 0, 0
    for i in range(40):
        manager.new_step_starts()
        shared = trunks[rng.integers(2)][: rng.integers(1, MAX_MODEL_LEN - 300)]
        tail = rng.integers(0, 50_000, rng.integers(1, 300)).tolist()
        request = Request(f"r{i}", shared + tail, block_hasher=HASHER)
        blocks, hit = manager.get_computed_blocks(request)
        assert hit == longest_hit(manager, request)
        for group_id, ids in enumerate(blocks.get_block_ids()):
            needed = needed_columns(manager, group_id, hit)
            assert [column for column, block_id in enumerate(ids) if block_id] == list(needed)
        hits += hit > 0
        limited += hit < 256 * int(cached_columns(manager, request.block_hashes, 0).sum())
        if run(manager, request, blocks, hit):
            running.append(request)
        if running and (len(running) > 1 or rng.random() < 0.5):
            manager.free(running.pop(rng.integers(len(running))))
    assert hits >= 5
    assert limited >= 3  # the compressed caches had more, a window less


@pytest.mark.parametrize(("name", "tables"), [("pools_as_in_flash", 4), ("windows_beside_compressed", 5)])
def test_a_request_holds_what_was_planned(name: str, tables: int) -> None:
    plan = planned(name, 1)
    assert (len(plan.groups), len(plan.pools)) == (tables, 8 - tables)
    manager = manager_of(plan)
    request = Request("r", list(range(MAX_MODEL_LEN)), block_hasher=HASHER)
    assert run(manager, request, None, 0)
    held = [pool.num_blocks - 1 - pool.num_free_blocks for pool in manager.block_pools]
    for pool, blocks in zip(plan.pools, held, strict=True):
        assert blocks <= pool.request_blocks + pool.in_flight_blocks
    manager.free(request)
    again = Request("s", [*range(MAX_MODEL_LEN - 1), 0], block_hasher=HASHER)
    blocks, hit = manager.get_computed_blocks(again)
    assert hit == MAX_MODEL_LEN - 256
    assert manager.allocate_slots(again, 1, hit, blocks) is not None
    live = [sum(block_id != 0 for block_id in ids) for ids in manager.get_block_ids("s")]
    assert live == [8, *[2 + 1] * (tables - 2), 16 + 1]  # with what the next token reads, and its own block


def test_without_hybrid_hits_need_no_windows() -> None:
    """One table of blocks of 256 tokens: every full block is a hit, and none is given back before the end."""
    specs = small_v4("pools_as_in_flash").kv_cache_specs()
    plan = plan_kv_cache(specs, num_blocks=64, max_model_len=MAX_MODEL_LEN, hybrid=False)
    manager = KVCacheManager(plan.config, MAX_MODEL_LEN, 256)
    hasher = BlockHasher(256, "xxhash_cbor", seed="0")
    request = Request("r", list(range(1_000)), block_hasher=hasher)
    assert run(manager, request, None, 0)
    assert [sum(map(bool, ids)) for ids in manager.get_block_ids("r")] == [4]
    again = Request("s", list(range(900)), block_hasher=hasher)
    assert manager.get_computed_blocks(again)[1] == 768


def test_hashes_of_256_tokens_do_not_make_those_of_4() -> None:
    plan = planned("pools_as_in_flash", 1)
    with pytest.raises(ValueError, match=r"expected hash_block_size to divide .* got hash_block_size 256 and slid"):
        KVCacheManager(plan.config, MAX_MODEL_LEN, 256)

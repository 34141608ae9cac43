"""KV events: what a router is told replays to the pool's prefix cache, tokens and parents included."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvjax.core.hashing.block_hash import BlockHasher
from kvjax.core.hashing.extra_keys import LoRARequest, MultiModalFeature
from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.manager.kv_cache_manager import KVCacheManager
from kvjax.core.pool.block_pool import BlockPool
from kvjax.core.requests.request import Request
from kvjax.core.spec import KVCacheConfig, KVCacheGroupSpec, KVCachePoolSpec
from kvjax.core.watch.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, GroupInfo

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

from random_calls import DEPLOYMENTS, RandomCalls

SIZE = 4
KEEP_ALL = {"full_attention", "mla_attention", "sink_full_attention"}
HASHER = BlockHasher(SIZE, "sha256_cbor", seed="events")


def make_request(num_tokens: int = 5 * SIZE, first_token: int = 0, **options) -> Request:
    return Request("r", np.arange(first_token, first_token + num_tokens), block_hasher=HASHER, **options)


def make_pool(num_blocks: int = 8, **options) -> BlockPool:
    return BlockPool(num_blocks, hash_block_size=SIZE, enable_kv_cache_events=True, free_order="append", **options)


def test_a_run_is_told_with_its_parent_and_tokens() -> None:
    pool, request = make_pool(), make_request()
    ids = pool.get_new_blocks(5)
    pool.cache_full_blocks(request, ids[:2], request.block_hashes, 0, 0)
    pool.cache_full_blocks(request, ids[2:], request.block_hashes, 2, 0)
    first, second = pool.take_events()
    hashes = tuple(request.block_hashes)
    assert first == BlockStored(
        block_hashes=hashes[:2], parent_block_hash=None, token_ids=tuple(range(2 * SIZE)), block_size=SIZE
    )
    assert second == BlockStored(
        block_hashes=hashes[2:],
        parent_block_hash=hashes[1],
        token_ids=tuple(range(2 * SIZE, 5 * SIZE)),
        block_size=SIZE,
    )
    assert pool.take_events() == []


def test_null_blocks_split_a_run_and_are_not_registered() -> None:
    pool, request = make_pool(), make_request()
    ids = pool.get_new_blocks(5)
    ids[[0, 2]] = 0
    pool.cache_full_blocks(request, ids, request.block_hashes, 0, 0)
    first, second = pool.take_events()
    hashes = tuple(request.block_hashes)
    assert (first.block_hashes, first.parent_block_hash) == (hashes[1:2], hashes[0])
    assert first.token_ids == tuple(range(SIZE, 2 * SIZE))
    assert (second.block_hashes, second.parent_block_hash) == (hashes[3:], hashes[2])
    assert second.token_ids == tuple(range(3 * SIZE, 5 * SIZE))
    assert pool.find_each(request.block_hashes, 0).tolist() == [-1, 2, -1, 4, 5]
    assert not pool.is_hashed[0]


def test_only_null_blocks_tell_nothing() -> None:
    pool, request = make_pool(), make_request()
    pool.cache_full_blocks(request, np.zeros(3, np.int32), request.block_hashes, 0, 0)
    assert (pool.take_events(), pool.num_hashed_blocks) == ([], 0)


def test_events_name_the_group_its_kind_and_window() -> None:
    pool, request = make_pool(group_ids=(1, 4)), make_request()
    pool.register_group(4, GroupInfo(SIZE, "sliding_window", 128))
    pool.cache_full_blocks(request, pool.get_new_blocks(1), request.block_hashes, 0, 4)
    pool.evict_blocks([1])
    stored, removed = pool.take_events()
    assert (stored.group_idx, stored.kind, stored.sliding_window) == (4, "sliding_window", 128)
    assert removed == BlockRemoved((request.block_hashes[0],), group_idx=4)


def test_extra_keys_are_told_per_block_and_without_tags() -> None:
    pool = make_pool()
    request = make_request(
        lora=LoRARequest("adapter"), cache_salt="salt", mm_features=[MultiModalFeature("image", SIZE + 1, 2)]
    )
    pool.cache_full_blocks(request, pool.get_new_blocks(5), request.block_hashes, 0, 0)
    (event,) = pool.take_events()
    assert event.lora_name == "adapter"
    assert event.extra_keys == (
        ("adapter", "salt"),
        ("adapter", ("image", 1)),
        ("adapter",),
        ("adapter",),
        ("adapter",),
    )


def test_the_number_of_an_adapter_is_told_if_it_has_one() -> None:
    pool = make_pool()
    told = []
    for i, lora in enumerate((None, LoRARequest("adapter", "/1"), LoRARequest("adapter", "/1", adapter_id=7))):
        request = make_request(SIZE, first_token=i * SIZE, lora=lora)
        pool.cache_full_blocks(request, pool.get_new_blocks(1), request.block_hashes, 0, 0)
        (event,) = pool.take_events()
        told.append((event.lora_id, event.lora_name))
    assert told == [(None, None), (None, "adapter"), (7, "adapter")]


def test_reuse_is_told_block_by_block_in_eviction_order() -> None:
    pool, request = make_pool(6), make_request()
    ids = pool.get_new_blocks(5)
    pool.cache_full_blocks(request, ids, request.block_hashes, 0, 0)
    pool.free_blocks(ids[::-1])
    pool.take_events()
    pool.get_new_blocks(2)
    pool.get_new_block()
    removed = [BlockRemoved((request.block_hashes[i],)) for i in (4, 3, 2)]
    assert pool.take_events() == removed


def test_a_reset_is_told_once_and_a_refused_one_not_at_all() -> None:
    pool, request = make_pool(), make_request()
    ids = pool.get_new_blocks(1)
    pool.cache_full_blocks(request, ids, request.block_hashes, 0, 0)
    pool.take_events()
    assert not pool.reset_prefix_cache()
    assert pool.take_events() == []
    pool.free_blocks(ids)
    assert pool.reset_prefix_cache()
    assert pool.take_events() == [AllBlocksCleared()]


def two_pools() -> KVCacheManager:
    config = KVCacheConfig(
        (KVCachePoolSpec(8), KVCachePoolSpec(8)),
        tuple(
            KVCacheGroupSpec(
                (f"layers.{pool_id}",),
                FullAttentionSpec(block_size=SIZE, num_kv_heads=1 + pool_id, head_size=8, dtype="bfloat16"),
                pool_id,
            )
            for pool_id in range(2)
        ),
    )
    return KVCacheManager(config, 64, SIZE, enable_kv_cache_events=True)


def test_pools_share_the_order_of_events_and_one_clearing() -> None:
    """What any pool stored after a reset comes after the one event that voids the blocks of all pools."""
    manager = two_pools()
    for _ in range(2):
        request = make_request()
        assert manager.allocate_slots(request, 5 * SIZE) is not None
        manager.free(request)
        assert manager.reset_prefix_cache()
    request = make_request()
    assert manager.allocate_slots(request, 5 * SIZE) is not None
    told = [getattr(event, "group_idx", None) for event in manager.take_events()]
    assert told == [0, 1, None] * 2 + [0, 1]
    assert manager.take_events() == []


def test_evictions_are_counted_resets_are_not() -> None:
    pool, request = make_pool(6), make_request()
    ids = pool.get_new_blocks(5)
    pool.cache_full_blocks(request, ids, request.block_hashes, 0, 0)
    pool.evict_blocks(ids[:1])
    pool.free_blocks(ids[::-1])
    assert pool.num_evicted_blocks == 1
    pool.free_blocks(pool.get_new_blocks(3))
    assert pool.num_evicted_blocks == 4
    assert pool.reset_prefix_cache()
    assert pool.num_evicted_blocks == 4


def test_without_events_nothing_is_told() -> None:
    pool, request = BlockPool(8), make_request()
    ids = pool.get_new_blocks(5)
    pool.cache_full_blocks(request, ids, request.block_hashes, 0, 0)
    pool.evict_blocks(ids)
    pool.free_blocks(ids)
    pool.reset_prefix_cache()
    assert pool.take_events() == []


def test_blocks_of_many_requests_cannot_be_told_without_them() -> None:
    pool = make_pool()
    ids = pool.get_new_blocks(1)
    with pytest.raises(ValueError, match="expected cache_full_blocks per request while KV events are on"):
        pool.register_many(ids, [b"h" * 32], 0)


@pytest.mark.parametrize("seed", range(10))
def test_a_router_that_replays_the_events_knows_the_cache(seed: int) -> None:
    """The router counts blocks per hash and re-hashes the tokens it is told, from the parent it is told."""
    rng = random.Random(seed)
    pool = make_pool(rng.randint(8, 30))
    known: dict[bytes, int] = {}
    for _ in range(60):
        request = make_request(first_token=rng.choice([0, 100]))
        if pool.num_free_blocks >= 5:
            ids = pool.get_new_blocks(5)
            split = rng.randint(0, 5)
            pool.cache_full_blocks(request, ids[:split], request.block_hashes, 0, 0)
            pool.cache_full_blocks(request, ids[split:], request.block_hashes, split, 0)
            if rng.random() < 0.9:
                pool.free_blocks(ids[::-1])
        if rng.random() < 0.1:
            pool.evict_blocks([rng.randrange(pool.num_blocks)])
        if rng.random() < 0.1:
            pool.free_blocks(np.flatnonzero(pool.ref_count))
            pool.reset_prefix_cache()
        for event in pool.take_events():
            if isinstance(event, BlockStored):
                tokens = np.array(event.token_ids)
                assert event.block_hashes == tuple(HASHER.hash_tokens(tokens, event.parent_block_hash))
                for block_hash in event.block_hashes:
                    known[block_hash] = known.get(block_hash, 0) + 1
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    known[block_hash] -= 1
            else:
                known.clear()
        cached = {block_hash: len(ids) for block_hash, ids in pool.snapshot().blocks_by_hash[0].items()}
        assert {block_hash: count for block_hash, count in known.items() if count} == cached


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_what_parents_tell(name: str) -> None:
    """The block before in the sequence; where a kind keeps all tokens, it was stored in the group before."""
    options = {**DEPLOYMENTS[name].options, "enable_kv_cache_events": True}
    calls = RandomCalls(replace(DEPLOYMENTS[name], options=options), np.random.default_rng(5))
    told: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
    take = calls.manager.take_events
    calls.manager.take_events = lambda: told.extend(take())  # random calls take events too
    requests: dict[str, Request] = {}
    for _ in range(150):
        calls.calls[int(np.searchsorted(calls.weights, calls.rng.random()))][0]()
        requests |= {request.request_id: request for request in calls.running}
    calls.manager.take_events()
    before: dict[tuple[int, bytes], bytes | None] = {}
    stored: set[tuple[int, bytes]] = set()
    runs = [event for event in told if isinstance(event, BlockStored)]
    for size in {run.block_size for run in runs}:
        for request in requests.values():
            hashes = calls.manager.groups.hashing.of_block_size(request.block_hashes, size)
            before |= {(size, block_hash): parent for block_hash, parent in zip(hashes, [None, *hashes], strict=False)}
    for run in runs:
        parents = (run.parent_block_hash, *run.block_hashes[:-1])
        assert parents == tuple(before[run.block_size, block_hash] for block_hash in run.block_hashes)
        parent = (run.group_idx, run.parent_block_hash)
        assert run.kind not in KEEP_ALL or run.parent_block_hash is None or parent in stored
        stored |= {(run.group_idx, block_hash) for block_hash in run.block_hashes}
    assert runs or not calls.manager.enable_caching

"""vLLM's calls with vLLM's objects: the same answers, over kvjax's blocks."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvjax.adapters.vllm import KVCacheManager, install, uninstall
from kvjax.core import BlockHasher
from kvjax.errors import BlockStateError, UnknownStackError
from tests.adapters.vllm.fake_vllm import NEW, RELEASES, Request, installed, make, recorded

BLOCK = 4
HASHER = BlockHasher(BLOCK, seed="test")


@pytest.fixture(params=RELEASES)
def vllm(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    with installed(recorded(request.param)) as found:
        found.name = request.param
        yield found


HEADS = {
    "num_kv_heads": 1,
    "head_size": 8,
    "dtype": "torch.bfloat16",
    "tokens_per_state": 1,
    "extra_retained_tokens": 0,
}
KINDS = {
    "FullAttentionSpec": {},
    "SlidingWindowSpec": {"sliding_window": 6},
    "ChunkedLocalAttentionSpec": {"attention_chunk_size": 8},
    "MLAAttentionSpec": {"compress_ratio": 1},
    "SinkFullAttentionSpec": {"sink_len": 4},
    "CrossAttentionSpec": {},
}


def spec_of(vllm: Any, kind: str, **fields: Any) -> Any:
    return make(getattr(vllm, kind), block_size=BLOCK, **HEADS, **KINDS.get(kind, {}), **fields)


def config_of(vllm: Any, *specs: Any, num_blocks: int = 32) -> Any:
    groups = [make(vllm.KVCacheGroupSpec, layer_names=[f"l{i}"], kv_cache_spec=s) for i, s in enumerate(specs)]
    return make(vllm.KVCacheConfig, num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def manager_of(vllm: Any, *specs: Any, num_blocks: int = 32, **options: Any) -> KVCacheManager:
    scheduler = {"scheduler_block_size": BLOCK} if vllm.name in NEW else {}
    config = config_of(vllm, *(specs or (spec_of(vllm, "FullAttentionSpec"),)), num_blocks=num_blocks)
    return KVCacheManager(config, max_model_len=64, hash_block_size=BLOCK, **scheduler, **options)


def request_of(name: str, token_ids: list[int]) -> Request:
    return Request(name, token_ids, list(HASHER.hash_tokens(token_ids)))


def test_a_request_is_allocated_hit_and_freed(vllm: Any) -> None:
    manager = manager_of(vllm, log_stats=True)
    first = request_of("a", list(range(10)))
    blocks, num_tokens, *_ = manager.get_computed_blocks(first)
    assert (blocks, num_tokens) == (manager.empty_kv_cache_blocks, 0)
    got = manager.allocate_slots(first, 10, num_tokens, blocks)
    assert got is not None
    assert got.get_block_ids() == ([1, 2, 3],)
    assert manager.get_block_ids("a") == ([1, 2, 3],)
    assert [block.ref_cnt for block in manager.block_pool.blocks[1:4]] == [1, 1, 1]
    second = request_of("b", [*range(8), 99])
    hit, num_tokens, *_ = manager.get_computed_blocks(second)
    assert (hit.get_block_ids(), num_tokens) == (([1, 2],), 8)
    got = manager.allocate_slots(second, 1, num_tokens, hit)
    assert got is not None
    assert got.get_block_ids() == ([4],)
    assert manager.coordinator.single_type_managers[0].req_to_blocks["b"] == manager.get_blocks("b").blocks[0]
    assert manager.block_pool.blocks[1].ref_cnt == 2
    manager.free(first)
    manager.free(second)
    manager.free(second)  # of no request: nothing
    assert manager.usage == 0
    assert len(manager.coordinator.single_type_managers[0].req_to_blocks) == 0
    assert manager.get_block_ids("a") == ([],)
    assert manager.reset_prefix_cache()
    stats = manager.make_prefix_cache_stats()
    assert stats.reset
    assert stats.records == ([] if vllm.name in NEW else [(10, 0, False), (9, 8, False)])
    manager._core.check_invariants()


def test_decoding_takes_vllms_counts_and_its_growing_hashes(vllm: Any) -> None:
    manager = manager_of(vllm)
    request = request_of("a", list(range(7)))
    manager.allocate_slots(request, 7)
    request.num_computed_tokens = 7
    for token in range(7, 13):
        request.all_token_ids.append(token)
        request.block_hashes[:] = HASHER.hash_tokens(request.all_token_ids)
        got = manager.allocate_slots(request, 1)
        assert got is not None
        assert got.get_block_ids(allow_none=True) == ({8: ([3],), 12: ([4],)}.get(token))
        request.num_computed_tokens += 1
    assert len(manager.block_pool.cached_block_hash_to_block) == 3
    assert manager.coordinator.single_type_managers[0].num_cached_block["a"] == 3
    manager._core.check_invariants()


def test_no_room_is_none_and_changes_nothing(vllm: Any) -> None:
    manager = manager_of(vllm, num_blocks=3)
    request = request_of("a", list(range(12)))
    assert manager.allocate_slots(request, 12) is None
    assert manager.block_pool.get_num_free_blocks() == 2
    assert manager.allocate_slots(request, 8) is not None
    with pytest.raises(ValueError, match="expected num_new_tokens >= 1, got 0"):
        manager.allocate_slots(request, 0)


def test_events_are_vllms_and_tell_the_tokens(vllm: Any) -> None:
    manager = manager_of(vllm, enable_kv_cache_events=True)
    request = request_of("a", list(range(7)))
    manager.allocate_slots(request, 7)
    request.num_computed_tokens = 7
    request.all_token_ids += [7]
    request.block_hashes[:] = HASHER.hash_tokens(request.all_token_ids)
    manager.allocate_slots(request, 1)
    waiting = manager.block_pool.kv_event_queue
    events = manager.take_events()
    assert waiting == events
    assert [event.token_ids for event in events] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert events[1].parent_block_hash == request.block_hashes[0]
    assert type(events[0]) is vllm.modules["vllm.distributed.kv_events"].BlockStored
    manager.free(request)
    manager.evict_blocks({1, 2})
    assert [type(event).__name__ for event in manager.take_events()] == ["BlockRemoved", "BlockRemoved"]


def test_blocks_held_from_outside_outlive_their_request(vllm: Any) -> None:
    """As deferred frees hold them: the last reference goes with `free_blocks`."""
    manager = manager_of(vllm)
    request = request_of("a", list(range(10)))
    manager.allocate_slots(request, 10)
    blocks = manager.pop_blocks_for_free(request)
    assert [block.ref_cnt for block in blocks] == [1, 1, 1]
    assert manager.block_pool.get_num_free_blocks() == 28
    manager._core.check_invariants()
    manager.block_pool.free_blocks(reversed(blocks))
    assert manager.block_pool.get_num_free_blocks() == 31
    manager._core.check_invariants()
    assert manager.pop_blocks_for_free(request) == []


def test_external_tokens_are_loaded_and_then_cached(vllm: Any) -> None:
    manager = manager_of(vllm)
    request = request_of("a", list(range(9)))
    got = manager.allocate_slots(request, 0, num_external_computed_tokens=8, delay_cache_blocks=True)
    assert got is not None
    assert manager.get_block_ids("a") == ([1, 2],)
    assert len(manager.block_pool.cached_block_hash_to_block) == 0
    request.num_computed_tokens = 8
    manager.cache_blocks(request, 8)
    assert len(manager.block_pool.cached_block_hash_to_block) == 2
    got = manager.allocate_slots(request, 1, 0, manager.empty_kv_cache_blocks)
    assert got is not None
    assert got.get_block_ids() == ([3],)


def test_computed_tokens_without_blocks_come_from_outside(vllm: Any) -> None:
    manager = manager_of(vllm)
    request = request_of("a", list(range(9)))
    request.num_computed_tokens = 8
    assert manager.allocate_slots(request, 1) is not None
    assert manager.get_block_ids("a") == ([1, 2, 3],)


def test_a_stale_hit_is_refused(vllm: Any) -> None:
    manager = manager_of(vllm)
    first = request_of("a", list(range(9)))
    manager.allocate_slots(first, 9)
    hit, num_tokens, *_ = manager.get_computed_blocks(request_of("b", list(range(9))))
    manager.evict_blocks(set(hit.get_block_ids()[0]))
    with pytest.raises(BlockStateError, match="look it up again"):
        manager.allocate_slots(request_of("b", list(range(9))), 1, num_tokens, hit)


def test_vllms_names_over_the_pool(vllm: Any) -> None:
    manager = manager_of(vllm)
    pool = manager.block_pool
    request = request_of("a", list(range(9)))
    manager.allocate_slots(request, 9)
    assert pool.num_gpu_blocks == 32
    assert pool.null_block.is_null
    assert pool.free_block_queue.num_free_blocks == 28
    assert [block.block_id for block in pool.free_block_queue.get_all_free_blocks()[:2]] == [4, 5]
    found = pool.get_cached_block(request.block_hashes[0], [0])
    assert found == [pool.blocks[1]]
    key = pool.blocks[1].block_hash
    assert pool.cached_block_hash_to_block.get_one_block(key) == pool.blocks[1]
    assert pool.cached_block_hash_to_block.pop(key, 2) is None
    assert pool.cached_block_hash_to_block.pop(key, 1) == pool.blocks[1]
    assert pool.get_cached_block(request.block_hashes[0], [0]) is None
    with pytest.raises(AssertionError, match=r"expected block ids in \[0, 32\), got 1 to 40"):
        pool.evict_blocks({1, 40})
    taken = pool.get_new_blocks(2)
    manager._core.check_invariants()
    pool.free_blocks(taken)
    with pytest.raises(ValueError, match="needs 40 blocks, 28 free"):
        pool.get_new_blocks(40)
    assert manager.coordinator.get_num_blocks_to_allocate("a", 20, ()) == 2
    assert manager.coordinator.get_num_blocks_to_allocate("new", 20, ((),)) == 5
    hit, num_tokens = manager.coordinator.find_longest_cache_hit(request.block_hashes, 8)
    assert ([len(blocks) for blocks in hit], num_tokens) == ([0], 0)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_allocates(vllm: Any, kind: str) -> None:
    manager = manager_of(vllm, spec_of(vllm, "FullAttentionSpec"), spec_of(vllm, kind))
    request = request_of("a", list(range(9)))
    assert manager.allocate_slots(request, 9, num_encoder_tokens=8 if kind == "CrossAttentionSpec" else 0) is not None
    assert [len(ids) for ids in manager.get_block_ids("a")] == [3, 2 if kind == "CrossAttentionSpec" else 3]
    manager._core.check_invariants()


def test_layers_of_one_table_key_are_one_group(vllm: Any) -> None:
    uniform = make(
        vllm.UniformTypeKVCacheSpecs, block_size=BLOCK, kv_cache_specs={"l0": spec_of(vllm, "FullAttentionSpec")}
    )
    assert manager_of(vllm, uniform).num_kv_cache_groups == 1


def test_recurrent_kinds_allocate_and_their_pages_are_vllms(vllm: Any) -> None:
    fields = {"shapes": (1, 1), "dtypes": ("torch.float32",), "mamba_cache_mode": "none", "num_speculative_blocks": 0}
    spec = make(vllm.MambaSpec, block_size=64, num_prefill_checkpoint_blocks=0, **fields)
    manager = manager_of(vllm, spec, enable_caching=False)
    assert manager.allocate_slots(request_of("a", list(range(9))), 9) is not None
    assert manager.get_block_ids("a") == ([1],)


def test_what_has_no_counterpart_is_refused_by_its_name(vllm: Any) -> None:
    encoder = spec_of(vllm, "EncoderOnlyAttentionSpec")
    with pytest.raises(NotImplementedError, match=r"no kind of kvjax\.core is what EncoderOnlyAttentionSpec is"):
        manager_of(vllm, encoder)
    fields = {"shapes": (1,), "dtypes": ("torch.float32",), "mamba_cache_mode": "all", "num_speculative_blocks": 0}
    mamba = make(vllm.MambaSpec, block_size=64, num_prefill_checkpoint_blocks=0, **fields)
    with pytest.raises(NotImplementedError, match="mamba_cache_mode 'all'"):
        manager_of(vllm, mamba)
    if vllm.name == "0.33":
        with pytest.raises(NotImplementedError, match="num_hash_lookahead_tokens=2 with KV events has no counterpart"):
            manager_of(vllm, num_hash_lookahead_tokens=2, enable_kv_cache_events=True)
    if vllm.name in NEW:
        window = make(
            vllm.SlidingWindowSpec, block_size=BLOCK, **HEADS | {"extra_retained_tokens": 3}, sliding_window=6
        )
        with pytest.raises(NotImplementedError, match=r"SlidingWindowSpec\.extra_retained_tokens=3"):
            manager_of(vllm, window)


def test_bad_arguments_are_refused_by_name(vllm: Any) -> None:
    config = config_of(vllm, spec_of(vllm, "FullAttentionSpec"))
    with pytest.raises(TypeError, match="'hue' is no argument of vllm"):
        KVCacheManager(config, 64, hue=1)
    with pytest.raises(TypeError, match="'max_model_len' comes twice"):
        KVCacheManager(config, 64, max_model_len=64)
    with pytest.raises(TypeError, match="lacks the argument 'max_model_len'"):
        KVCacheManager(config)
    with pytest.raises(TypeError, match="arguments, got 40"):
        KVCacheManager(*range(40))
    with pytest.raises(UnknownStackError, match="has no class SimpleNamespace"):
        manager_of(vllm, SimpleNamespace(block_size=4))


def test_a_request_that_lacks_an_attribute_is_refused_by_its_name(vllm: Any) -> None:
    request = request_of("a", list(range(9)))
    del request.lora_request
    with pytest.raises(UnknownStackError, match=r"Request of vllm .* lacks 'lora_request'"):
        manager_of(vllm).get_computed_blocks(request)


def test_install_passes_options_of_kvjax_on(vllm: Any) -> None:
    cls = install(eviction_policy="slru")
    try:
        options = {"scheduler_block_size": BLOCK} if vllm.name in NEW else {}
        manager = cls(config_of(vllm, spec_of(vllm, "FullAttentionSpec")), 64, hash_block_size=BLOCK, **options)
        assert type(manager._core.block_pool.eviction_policy).__name__ == "SegmentedLRUPolicy"
    finally:
        uninstall()


def test_residency_is_told_to_vllms_collector(vllm: Any) -> None:
    told: list[tuple[str, int]] = []
    collector = SimpleNamespace(
        on_block_allocated=lambda block: told.append(("allocated", block.block_id)),
        on_block_accessed=lambda block: told.append(("accessed", block.block_id)),
        on_block_evicted=lambda block: told.append(("evicted", block.block_id)),
        reset=lambda: told.append(("reset", 0)),
    )
    manager = manager_of(vllm, metrics_collector=collector)
    manager.allocate_slots(request_of("a", list(range(5))), 5)
    hit, num_tokens, *_ = manager.get_computed_blocks(request_of("b", list(range(5))))
    manager.allocate_slots(request_of("b", list(range(5))), 1, num_tokens, hit)
    assert ("allocated", 1) in told
    assert ("accessed", 1) in told
    for name in ("a", "b"):
        manager.free(request_of(name, [0]))
    manager.reset_prefix_cache()
    assert told[-1] == ("reset", 0)


def test_hits_of_0_33_can_be_cut_and_told_for_connectors(vllm: Any) -> None:
    manager = manager_of(vllm)
    request = request_of("a", list(range(13)))
    manager.allocate_slots(request, 13)
    other = request_of("b", list(range(13)))
    hit, num_tokens, *_ = manager.get_computed_blocks(other, max_cache_hit_length=8)
    assert (hit.get_block_ids(), num_tokens) == (([1, 2],), 8)
    cut = manager.truncate_computed_blocks(hit, 4)
    assert cut.get_block_ids() == ([1],)
    assert manager.get_computed_blocks_for_connector(other)[1] == 12
    assert manager.get_computed_blocks_for_connector(other)[-1] is False
    assert manager.get_block_ids_for_computed_tokens("a", 5) == ([1, 2],)
    assert manager.estimate_cached_tokens(request) == 12
    assert manager.get_num_common_prefix_blocks("a") == ([0] if vllm.name in NEW else [4])
    assert manager.take_new_block_ids() == []
    assert manager.take_kv_cache_block_copies() == ([], [])
    assert manager.take_boundary_state_offloads() == {}
    assert manager.finalize_partial_tail_offloads(request) == []
    manager.record_blocks_for_zeroing("a", 0)
    manager.remove_skipped_blocks("a", 13)
    manager.new_step_starts()


def test_the_watermark_keeps_blocks_free_once_something_runs(vllm: Any) -> None:
    if vllm.name not in NEW:
        pytest.skip("the watermark came later")
    manager = manager_of(vllm, num_blocks=11, watermark=0.2)
    request = request_of("a", list(range(36)))
    assert manager.allocate_slots(request, 36) is None
    assert manager.allocate_slots(request, 36, full_sequence_must_fit=True) is None
    assert manager.allocate_slots(request, 36, has_scheduled_reqs=False, reserved_blocks=2) is None
    assert manager.allocate_slots(request, 36, has_scheduled_reqs=False) is not None


def mamba_of(vllm: Any) -> Any:
    fields = {"shapes": (1, 1), "dtypes": ("torch.float32",), "mamba_cache_mode": "align", "num_speculative_blocks": 0}
    return make(vllm.MambaSpec, block_size=BLOCK, num_prefill_checkpoint_blocks=0, dcp_sharded=False, **fields)


def compute(manager: KVCacheManager, request: Request, *steps: int) -> None:
    for num_tokens in steps:
        manager.new_step_starts()
        assert manager.allocate_slots(request, num_tokens) is not None
        request.num_computed_tokens += num_tokens
    manager.new_step_starts()


@pytest.fixture
def newest() -> Iterator[SimpleNamespace]:
    with installed(recorded("0.33")) as found:
        found.name = "0.33"
        yield found


def test_coordinators_and_managers_pass_for_vllms(vllm: Any) -> None:
    coordinators = vllm.modules["vllm.v1.core.kv_cache_coordinator"]
    managers = vllm.modules["vllm.v1.core.single_type_kv_cache_manager"]
    one = manager_of(vllm)
    two = manager_of(vllm, spec_of(vllm, "FullAttentionSpec"), spec_of(vllm, "CrossAttentionSpec"))
    assert type(one.coordinator).__name__ == "UnitaryKVCacheCoordinator"
    assert isinstance(two.coordinator, coordinators.HybridKVCacheCoordinator)
    assert not isinstance(one.coordinator, coordinators.HybridKVCacheCoordinator)
    assert isinstance(two.coordinator.single_type_managers[1], managers.CrossAttentionManager)
    assert [group.group_ids for group in two.coordinator.attention_groups] == [[0]]
    off = manager_of(vllm, enable_caching=False)
    assert isinstance(off.coordinator, coordinators.KVCacheCoordinatorNoPrefixCache)


def fine_manager(vllm: Any, checkpoints: int = 0, **options: Any) -> KVCacheManager:
    """Full attention in hash blocks beside states of two of them."""
    fields = {"shapes": (1, 1), "dtypes": ("torch.float32",), "mamba_cache_mode": "align", "num_speculative_blocks": 0}
    more = {
        "num_prefill_checkpoint_blocks": checkpoints,
        "prefill_checkpoint_alignment": BLOCK if checkpoints else None,
    }
    states = make(vllm.MambaSpec, block_size=2 * BLOCK, dcp_sharded=False, **fields, **more)
    return manager_of(vllm, spec_of(vllm, "FullAttentionSpec"), states, **options)


def test_hits_of_0_33_end_inside_blocks_of_states_and_are_copied(newest: Any) -> None:
    manager = fine_manager(newest)
    assert manager.coordinator.enable_partial_hash_hits
    assert manager.coordinator.scheduler_block_size == 2 * BLOCK
    owner = request_of("a", list(range(14)))
    compute(manager, owner, 12)
    [_, tail] = manager.get_block_ids("a")[1]
    manager.free(owner)
    hit, num_tokens, _ = manager.get_computed_blocks(other := request_of("b", [*range(12), 90, 91]))
    assert (hit.get_block_ids()[1], num_tokens) == ([0, tail], 12)
    [_, new] = manager.allocate_slots(other, 2, num_tokens, hit).get_block_ids()
    assert manager.get_block_ids("b")[1] == [0, *new]
    copies, held = manager.take_kv_cache_block_copies()
    assert copies == [(tail, new[0])]
    assert sorted(block.block_id for block in held) == sorted([tail, new[0]])
    assert [block.ref_cnt for block in sorted(held, key=lambda block: block.block_id == tail)] == [2, 1]
    manager.block_pool.free_blocks(held)
    assert manager.take_kv_cache_block_copies() == ([], [])
    manager._core.check_invariants()


def test_the_copy_of_a_state_that_its_request_writes_over_is_offered(newest: Any) -> None:
    manager = fine_manager(newest)
    owner = request_of("a", list(range(14)))
    compute(manager, owner, 12)
    tail = manager.get_block_ids("a")[1][1]
    assert manager.take_boundary_state_offloads() == {}
    compute(manager, owner, 1)
    [copy], held = manager.take_kv_cache_block_copies()
    assert copy.src_block_id == tail
    assert manager.take_boundary_state_offloads() == {"a": [(1, copy.dst_block_id, 12)]}
    assert manager.finalize_partial_tail_offloads(owner) == []
    manager.block_pool.free_blocks(held)
    second = request_of("b", list(range(40, 54)))
    compute(manager, second, 12)
    own = manager.get_block_ids("b")[1][1]
    assert manager.finalize_partial_tail_offloads(second) == [(1, own, 12)]
    assert manager.finalize_partial_tail_offloads(second) == []


def test_checkpoint_blocks_of_0_33_are_taken_and_offered(newest: Any) -> None:
    manager = fine_manager(newest, checkpoints=1)
    compute(manager, request_of("a", list(range(30))), 30)
    [*passed, checkpoint, running] = manager.get_block_ids("a")[1]
    assert passed == [0, 0]
    assert checkpoint
    assert running
    assert manager.take_boundary_state_offloads() == {"a": [(1, checkpoint, 28)]}
    hit, num_tokens, *_ = manager.get_computed_blocks_for_connector(request_of("b", list(range(30))))
    assert (hit.get_block_ids()[1], num_tokens) == ([0, 0, 0, checkpoint], 28)


def test_hits_end_at_whole_blocks_where_hash_blocks_are_as_large(newest: Any) -> None:
    manager = manager_of(newest, spec_of(newest, "FullAttentionSpec"), mamba_of(newest))
    assert not manager.coordinator.enable_partial_hash_hits
    with pytest.raises(AssertionError, match="expected tokens of whole blocks of 4 that are hit, got 5"):
        manager.truncate_computed_blocks(manager.empty_kv_cache_blocks, 5)


def test_groups_that_ranks_do_not_share_keep_their_blocks(newest: Any) -> None:
    specs = [spec_of(newest, "FullAttentionSpec", dcp_sharded=sharded) for sharded in (True, False)]
    manager = manager_of(newest, *specs, dcp_world_size=2)
    assert manager.coordinator.group_block_sizes == (8, 4)
    request = request_of("a", list(range(17)))
    compute(manager, request, 17)
    assert [len(ids) for ids in manager.get_block_ids("a")] == [3, 5]
    hit, num_tokens, _ = manager.get_computed_blocks(request_of("b", list(range(15))))
    assert ([len(blocks) for blocks in hit.blocks], num_tokens) == ([1, 2], 8)
    window = spec_of(newest, "SlidingWindowSpec", dcp_sharded=True)
    with pytest.raises(NotImplementedError, match=r"SlidingWindowSpec\.dcp_sharded=True with dcp_world_size=2"):
        manager_of(newest, specs[0], window, dcp_world_size=2)


def test_tokens_that_are_computed_again_are_not_cached_yet(newest: Any) -> None:
    manager = manager_of(newest, num_prefill_lookahead=3)
    request = request_of("a", list(range(13)))
    compute(manager, request, 9, 1)
    assert manager.coordinator.single_type_managers[0].num_cached_block["a"] == 2
    assert manager.coordinator.num_reprefillable_tokens == 2
    compute(manager, request, 3)
    manager.cache_blocks(request, 13)
    assert manager.coordinator.single_type_managers[0].num_cached_block["a"] == 2


def test_a_connector_is_told_of_hits_that_only_states_lack(newest: Any) -> None:
    manager = manager_of(newest, spec_of(newest, "FullAttentionSpec"), mamba_of(newest))
    request = request_of("a", list(range(17)))
    compute(manager, request, 4, 4, 4, 4)
    states = [block.block_id for block in manager.coordinator.single_type_managers[1].req_to_blocks["a"]]
    offers = manager.take_boundary_state_offloads()["a"]
    assert [(group, tokens) for group, _, tokens in offers] == [(1, 4), (1, 8), (1, 12), (1, 16)]
    assert offers[-1][1] == states[3]
    assert manager.take_boundary_state_offloads() == {}
    manager.evict_blocks({block_id for _, block_id, tokens in offers if tokens > 4})
    other = request_of("b", list(range(21)))
    _, lengths = manager.coordinator.find_longest_cache_hit_per_group(other.block_hashes, 20)
    assert lengths == (16, 4)
    assert manager.get_computed_blocks(other)[1:] == (4, 16)
    hit, num_tokens, shared, is_deeper = manager.get_computed_blocks_for_connector(other)
    assert (num_tokens, shared, is_deeper) == (16, 0, True)
    assert manager.allocate_slots(other, 0, num_tokens, hit, num_external_computed_tokens=4) is not None
    manager._core.check_invariants()
    manager.evict_blocks({manager.get_block_ids("a")[0][1]})
    assert manager.get_computed_blocks_for_connector(request_of("c", list(range(21))))[1:] == (4, 0, False)


def test_states_of_a_request_that_ended_are_not_offered(newest: Any) -> None:
    manager = manager_of(newest, spec_of(newest, "FullAttentionSpec"), mamba_of(newest))
    for end in (manager.free, manager.pop_blocks_for_free):
        request = request_of("a", list(range(8)))
        compute(manager, request, 4)
        end(request)
    assert manager.take_boundary_state_offloads() == {}


def test_a_state_of_this_step_is_waited_for(vllm: Any) -> None:
    manager = manager_of(vllm, spec_of(vllm, "FullAttentionSpec"), mamba_of(vllm))
    assert manager.allocate_slots(request_of("a", list(range(8))), 8) is not None
    other = request_of("b", list(range(9)))
    hit, num_tokens, *_ = manager.get_computed_blocks(other)
    assert num_tokens == 8
    assert manager.allocate_slots(other, 1, num_tokens, hit) is None
    if vllm.name == "0.16":
        manager.take_events()  # its scheduler tells of no steps, but takes events after each
    else:
        manager.new_step_starts()
    assert manager.allocate_slots(other, 1, num_tokens, hit) is not None


def test_sparse_caching_follows_vllms_request(newest: Any) -> None:
    """The shared prefix that is kept is the one that the scheduler noted in the request."""
    windows = spec_of(newest, "FullAttentionSpec"), spec_of(newest, "SlidingWindowSpec")
    config = config_of(newest, *windows)
    config.prefix_cache_retention_interval = 0
    for shared, expected in ((0, 0), (8, 8)):
        manager = KVCacheManager(config, max_model_len=64, hash_block_size=BLOCK, scheduler_block_size=BLOCK)
        assert manager.coordinator.retention_interval == 0
        for name, tail in (("a", 50), ("b", 60)):
            request = request_of(name, [*range(8), *[tail] * 8])
            request.shared_prefix_boundary = shared
            hit, num_tokens, boundary = manager.get_computed_blocks(request)
            manager.allocate_slots(request, 16 - num_tokens, num_tokens, hit)
        assert boundary == (8 if not shared else 0)
        assert manager.get_computed_blocks(request_of("c", [*range(8), 70]))[1] == expected


@pytest.mark.parametrize(
    ("kind", "interval", "message"),
    [
        ("FullAttentionSpec", 4, "no sliding-window or Mamba group"),
        ("SlidingWindowSpec", -4, "non-negative multiple of scheduler_block_size=4, got -4"),
        ("SlidingWindowSpec", 6, "non-negative multiple of scheduler_block_size=4, got 6"),
    ],
)
def test_retention_is_checked_as_vllm_does(newest: Any, kind: str, interval: int, message: str) -> None:
    config = config_of(newest, spec_of(newest, kind))
    config.prefix_cache_retention_interval = interval
    with pytest.raises(ValueError, match=message):
        KVCacheManager(config, max_model_len=64, hash_block_size=BLOCK, scheduler_block_size=BLOCK)


def test_pages_that_a_load_writes_are_zeroed_but_in_the_groups_that_vllm_names(newest: Any) -> None:
    config = config_of(newest, spec_of(newest, "FullAttentionSpec"))
    config.needs_kv_cache_zeroing = True
    manager = KVCacheManager(config, max_model_len=64, hash_block_size=BLOCK, scheduler_block_size=BLOCK)
    request = request_of("a", list(range(20)))
    load = {"num_external_computed_tokens": 8, "delay_cache_blocks": True}
    assert manager.allocate_slots(request, 4, **load, skip_zeroing_group_ids=(0,)) is not None
    assert manager.take_new_block_ids() == [3]
    manager.record_blocks_for_zeroing("a", 4)
    assert manager.take_new_block_ids() == [2, 3]
    assert manager.allocate_slots(request_of("b", list(range(50, 70))), 4, **load) is not None
    assert sorted(manager.take_new_block_ids()) == [4, 5, 6]
    assert manager.take_new_block_ids() == []


def test_a_preempted_request_keeps_the_window_at_the_end_of_its_prompt(newest: Any) -> None:
    """With 5 of the window's 6 tokens before 20, which the same prompt can hit; the answer was 9 tokens by then."""
    config = config_of(newest, spec_of(newest, "FullAttentionSpec"), spec_of(newest, "SlidingWindowSpec"))
    config.prefix_cache_retention_interval = 0
    manager = KVCacheManager(config, max_model_len=64, hash_block_size=BLOCK, scheduler_block_size=BLOCK)
    request = request_of("a", list(range(30)))
    request.num_prompt_tokens = 21
    compute(manager, request, 30)
    cached = [[block.block_hash is not None for block in blocks] for blocks in manager.get_blocks("a").blocks]
    assert [[i for i, is_cached in enumerate(group) if is_cached] for group in cached] == [list(range(7)), [3, 4]]


def test_a_request_with_an_empty_prompt_gets_slots(vllm: Any) -> None:
    """As vLLM gives it."""
    manager = manager_of(vllm)
    blocks = manager.allocate_slots(request_of("a", []), num_new_tokens=3, num_lookahead_tokens=2)
    assert [len(group) for group in blocks.blocks] == [2]


def test_a_load_into_a_window_that_is_not_cached_is_not_zeroed_where_vllm_names_it(newest: Any) -> None:
    """The window's pages behind the loaded tokens are no load's, so they are zeroed."""
    window = spec_of(newest, "SlidingWindowMLASpec", sliding_window=8, bounded_replay=True)
    config = config_of(newest, spec_of(newest, "FullAttentionSpec"), window)
    config.needs_kv_cache_zeroing = True
    manager = KVCacheManager(config, max_model_len=64, hash_block_size=BLOCK, scheduler_block_size=BLOCK)
    load = {"num_external_computed_tokens": 8, "delay_cache_blocks": True}
    assert (
        manager.allocate_slots(request_of("a", list(range(20))), 4, **load, skip_zeroing_group_ids=(0, 1)) is not None
    )
    behind = [ids[8 // BLOCK :] for ids in manager.get_block_ids("a")]
    assert sorted(manager.take_new_block_ids()) == sorted(page for ids in behind for page in ids)


def test_a_pool_registers_blocks_that_were_taken_from_it(vllm: Any) -> None:
    manager = manager_of(vllm, enable_kv_cache_events=True)
    request = request_of("a", list(range(12)))
    blocks = manager.block_pool.get_new_blocks(3)
    manager.block_pool.cache_full_blocks(request, blocks, 0, 3, BLOCK, 0, block_mask=[True, False, True])
    assert [event.token_ids for event in manager.take_events()] == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert [block.block_hash is not None for block in blocks] == [True, False, True]


@pytest.mark.parametrize("kind", ["CircularBufferSpec", "SlidingWindowMLASpec"])
def test_groups_without_hits_leave_them_to_the_others(newest: Any, kind: str) -> None:
    spec = spec_of(newest, kind, sliding_window=8, bounded_replay=True)
    manager = manager_of(newest, spec_of(newest, "FullAttentionSpec"), spec)
    compute(manager, request_of("a", list(range(13))), 13)
    hit, num_tokens, _ = manager.get_computed_blocks(request_of("b", list(range(13))))
    assert ([len(blocks) for blocks in hit.blocks], num_tokens) == ([3, 0], 12)
    assert manager.truncate_computed_blocks(hit, 8).get_block_ids() == ([1, 2], [])


def test_answers_of_rswa_are_released_behind_the_window_and_cached(newest: Any) -> None:
    """A prompt of 6 tokens, a window of 5 and a token more that vLLM keeps: tokens 8 to 11 go with token 17."""
    spec = spec_of(newest, "RSWASpec", rswa_window=5)
    manager = manager_of(newest, spec, spec_of(newest, "FullAttentionSpec"), enable_kv_cache_events=True)
    request = request_of("a", list(range(6)))
    compute(manager, request, 6)
    held = []
    for token in range(6, 20):
        request.all_token_ids.append(token)
        request.block_hashes[:] = HASHER.hash_tokens(request.all_token_ids)
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
        held.append([block > 0 for block in manager.get_block_ids("a")[0][:4]])
    assert held[10:12] == [[True] * 4, [True, True, False, True]]
    assert {event.kv_cache_spec_kind for event in manager.take_events()} == {"full_attention"}
    assert manager.get_computed_blocks(request_of("b", list(range(30))))[1] == 20


def test_a_request_is_translated_again_where_it_has_grown(vllm: Any) -> None:
    manager = manager_of(vllm)
    request = request_of("a", list(range(8)))
    assert manager.get_computed_blocks(request)[1] == 0
    request.all_token_ids.append(8)
    request.block_hashes = list(HASHER.hash_tokens(request.all_token_ids))
    assert manager.allocate_slots(request, 9) is not None
    manager.free(request)
    assert manager.get_computed_blocks(request)[1] == 8
    manager._core.check_invariants()

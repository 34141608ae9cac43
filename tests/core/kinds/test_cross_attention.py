"""Cross attention: blocks by encoder tokens, for a request's whole life; nobody hits on another's input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvjax.core import (
    BlockHasher,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheManager,
    MultiModalFeature,
    Request,
)
from kvjax.core.kinds.prefix_lookup import PrefixLookup
from kvjax.core.step.step_builder import build_step_plan

HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
FULL = FullAttentionSpec(block_size=4, **HEADS)
CROSS = CrossAttentionSpec(block_size=4, max_num_encoder_tokens=10, **HEADS)
HASHER = BlockHasher(4, "xxhash_cbor", seed="0")


def make_manager(num_blocks: int = 30, **options: Any) -> KVCacheManager:
    return KVCacheManager(KVCacheConfig.single_pool(num_blocks, FULL, CROSS), 64, 4, **options)


def with_audio(name: str, audio: str) -> Request:
    return Request(name, range(9), mm_features=[MultiModalFeature(audio, 0, 1)], block_hasher=HASHER)


def test_only_a_named_input_is_looked_up() -> None:
    manager = make_manager()
    for request in (with_audio("a", "x"), Request("b", range(9), block_hasher=HASHER)):
        manager.allocate_slots(request, 9, num_encoder_tokens=5)
    assert manager.get_computed_blocks(with_audio("c", "x"))[1] == 8
    assert manager.get_computed_blocks(with_audio("d", "y"))[1] == 0
    assert manager.get_computed_blocks(Request("e", range(9), block_hasher=HASHER))[1] == 0
    hit, length = manager.get_computed_blocks(with_audio("c", "x"))
    assert [len(ids) for ids in hit.get_block_ids()] == [2, 0]
    again = with_audio("c", "x")
    blocks = manager.allocate_slots(again, 1, length, hit, num_encoder_tokens=10)
    assert blocks is not None
    assert [len(ids) for ids in blocks.get_block_ids()] == [1, 3]


def test_a_step_tells_encoder_lengths_and_writes_them_once() -> None:
    manager = make_manager()
    first, second = Request("a", range(3)), Request("b", range(5))
    for request, encoder in ((first, 6), (second, 9)):
        manager.allocate_slots(request, request.num_tokens, num_encoder_tokens=encoder)
    first.num_computed_tokens = 3
    first.append_output_token_ids(1)
    manager.allocate_slots(first, 1)
    plan = build_step_plan(manager, np.array([first.row, second.row]), np.array([1, 5]))
    cross = plan.groups[1]
    assert cross.kind == "cross_attention"
    assert cross.seq_lens.tolist() == [6, 9]
    ids = manager.get_block_ids("b")[1]
    assert cross.slot_mapping.tolist() == [ids[i // 4] * 4 + i % 4 for i in range(9)]
    assert plan.groups[0].slot_mapping.size == 6
    both = build_step_plan(
        manager, np.array([first.row, second.row]), np.array([1, 5]), writes_encoder=np.array([True, False])
    )
    assert both.groups[1].slot_mapping.size == 6


def test_refused_arguments_change_nothing() -> None:
    manager = make_manager()
    request = with_audio("r", "x")
    manager.allocate_slots(request, 9, num_encoder_tokens=5)
    request.num_computed_tokens = 9
    hit, _ = manager.get_computed_blocks(with_audio("s", "x"))
    wrong = manager.create_kv_cache_blocks([hit.get_block_ids()[0], [1, 2]])
    before = manager.snapshot()
    with pytest.raises(ValueError, match=r"expected num_encoder_tokens <= 10 \(max_num_encoder_tokens\), got 11"):
        manager.allocate_slots(with_audio("s", "x"), 9, num_encoder_tokens=11)
    with pytest.raises(ValueError, match="request 'r' is running; expected num_encoder_tokens when it was admitted"):
        manager.allocate_slots(request, 1, num_encoder_tokens=5)
    with pytest.raises(ValueError, match="group 1: expected no hit: its kind has no prefix cache"):
        manager.allocate_slots(with_audio("s", "x"), 1, 8, wrong, num_encoder_tokens=5)
    assert manager.allocate_slots(with_audio("t", "x"), 9, num_encoder_tokens=10) is not None
    assert manager.snapshot() != before


def test_the_kind_itself_answers_no_lookup() -> None:
    kind = make_manager().groups.managers[1]
    with pytest.raises(NotImplementedError, match="cross_attention blocks are no prefix hits"):
        kind.find_longest_cache_hit(PrefixLookup([], 4, 4, False))


def test_specs_that_can_not_be() -> None:
    with pytest.raises(ValueError, match="expected max_num_encoder_tokens >= 1, got 0"):
        CrossAttentionSpec(block_size=4, max_num_encoder_tokens=0, **HEADS)
    with pytest.raises(NotImplementedError, match="cross_attention attention does not work with context parallelism"):
        make_manager(dcp_world_size=2)


def test_reserved_admission_counts_the_longest_input() -> None:
    manager = make_manager(1 + 3 + 2, reserve=True)
    assert manager.allocate_slots(Request("a", range(8), max_tokens=1), 8, num_encoder_tokens=1) is None
    assert manager.allocate_slots(Request("b", range(7), max_tokens=1), 7, num_encoder_tokens=1) is not None

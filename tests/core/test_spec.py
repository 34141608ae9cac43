"""Configs that cannot be: layers that hold other blocks in one group, pages that cannot share, sharing with nobody."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvjax.core import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCachePoolSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from kvjax.core.spec import KVCacheSpec

HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_size": 8, "dtype": "bfloat16"}
FULL = FullAttentionSpec(block_size=16, **HEADS)
WINDOW = SlidingWindowSpec(block_size=16, sliding_window=64, **HEADS)
LATENT = MLAAttentionSpec(block_size=256, head_size=512, dtype="bfloat16", tokens_per_state=4)


@pytest.mark.parametrize(
    ("spec", "change", "same"),
    [
        (FULL, {"num_kv_heads": 4}, True),
        (FULL, {"head_size_v": 4, "dtype": "float32"}, True),
        (FULL, {"sliding_window": 64}, True),
        (FULL, {"block_size": 32}, False),
        (WINDOW, {"head_size": 16}, True),
        (WINDOW, {"sliding_window": 65}, False),
        (LATENT, {"tokens_per_state": 128, "head_size": 128}, True),
        (LATENT, {"cache_role": "draft"}, False),
        (SlidingWindowMLASpec(block_size=4, head_size=8, dtype="float32", sliding_window=8), {"head_size": 2}, True),
    ],
)
def test_layers_share_a_table_if_they_hold_the_same_blocks(spec: KVCacheSpec, change: dict, same: bool) -> None:
    assert (spec.table_key == replace(spec, **change).table_key) == same
    assert WINDOW.table_key != FULL.table_key


def test_layers_of_a_group_hold_the_same_blocks() -> None:
    two = KVCacheGroupSpec(("a", "b"), FULL, layer_specs=(FULL, replace(FULL, num_kv_heads=1)))
    assert [two.spec_of(i).page_size_bytes for i in range(2)] == [1_024, 512]
    assert KVCacheGroupSpec(("a", "b"), FULL).spec_of(1) == FULL
    with pytest.raises(
        ValueError, match=r"layer .b.: expected a spec that holds the same blocks as Full.*, got Sliding"
    ):
        KVCacheGroupSpec(("a", "b"), FULL, layer_specs=(FULL, WINDOW))
    with pytest.raises(ValueError, match="expected 2 layer_specs or none, got 1"):
        KVCacheGroupSpec(("a", "b"), FULL, layer_specs=(FULL,))


@pytest.mark.parametrize(("alignment", "page_bytes"), [(1, 65_536), (576, 65_664), (65_536, 65_536), (65_537, 65_537)])
def test_a_latent_page_is_a_multiple_of_its_alignment(alignment: int, page_bytes: int) -> None:
    """64 vectors of 512 numbers of 2 bytes."""
    assert replace(LATENT, page_alignment=alignment).page_size_bytes == page_bytes


@pytest.mark.parametrize("name", ["num_kv_heads", "head_size"])
def test_heads_have_a_number_and_a_size(name: str) -> None:
    with pytest.raises(ValueError, match=f"expected {name} >= 1, got 0"):
        replace(FULL, **{name: 0})


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((), "expected at least one KV-cache group, got none"),
        ((KVCacheGroupSpec(("a",), FULL, 1),), r"group 0: expected pool_id in \[0, 1\), got 1"),
        ((KVCacheGroupSpec(("a",), FULL, -1),), r"group 0: expected pool_id in \[0, 1\), got -1"),
        (
            (KVCacheGroupSpec(("a",), FULL), KVCacheGroupSpec(("b", "a"), WINDOW)),
            "layer 'a' is in groups 0 and 1; expected one group",
        ),
    ],
)
def test_groups_that_can_not_be(groups: tuple[KVCacheGroupSpec, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVCacheConfig((KVCachePoolSpec(8),), groups)


def test_pages_are_compared_as_the_pool_lays_them_out() -> None:
    """On a TPU vectors of other lengths have equal pages where both are padded to the same lanes."""
    short, long = (MLAAttentionSpec(block_size=4, head_size=size, dtype="float32") for size in (6, 8))
    groups = KVCacheGroupSpec(("a",), short), KVCacheGroupSpec(("b",), replace(long, cache_role="other"))
    config = KVCacheConfig((KVCachePoolSpec(8, (short.page_layout("tpu"),)),), groups)
    assert config.layer_index == {"a": (0, 0), "b": (1, 0)}
    with pytest.raises(ValueError, match="layers 'a' and 'b' cannot share column 0 of pool 0: expected equal pages"):
        KVCacheConfig((KVCachePoolSpec(8, (short.page_layout("cpu"),)),), groups)


def test_groups_with_other_pages_cannot_share_a_pool() -> None:
    layout = FULL.page_layout("cpu")
    pools = (KVCachePoolSpec(8, (layout, layout)), KVCachePoolSpec(8, (layout,)))
    other = replace(WINDOW, num_kv_heads=1)
    groups = KVCacheGroupSpec(("a", "b"), FULL), KVCacheGroupSpec(("c",), WINDOW)
    assert KVCacheConfig(pools, groups).layer_index["c"] == (1, 0)
    groups = KVCacheGroupSpec(("a", "b"), FULL), KVCacheGroupSpec(("c",), other)
    with pytest.raises(ValueError, match="layers 'a' and 'c' cannot share column 0 of pool 0: expected equal pages"):
        KVCacheConfig(pools, groups)
    KVCacheConfig(pools, (groups[0], replace(groups[1], pool_id=1)))
    KVCacheConfig((KVCachePoolSpec(8),), groups)  # ids alone may be shared by anything


def test_layers_may_read_the_pages_of_others() -> None:
    groups = (KVCacheGroupSpec(("a", "b"), FULL), KVCacheGroupSpec(("c",), WINDOW))
    config = KVCacheConfig((KVCachePoolSpec(8),), groups, (("d", "b"), ("e", "c")))
    assert (config.layer_index["d"], config.layer_index["e"]) == ((0, 1), (1, 0))


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        ((("a", "b"),), "layer 'a' shares the pages of 'b'; expected it in no group"),
        ((("d", "x"),), "layer 'd': expected to share the pages of a layer in a group, got 'x'"),
        ((("d", "a"), ("e", "d")), "layer 'e': expected to share the pages of a layer in a group, got 'd'"),
        ((("d", "a"), ("d", "b")), "layer 'd' shares the pages of 'b'; expected it in no group"),
    ],
)
def test_sharing_with_nobody_is_refused(shared: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVCacheConfig((KVCachePoolSpec(8),), (KVCacheGroupSpec(("a", "b"), FULL),), shared)

"""Laws of grouping: every layer in one group, equal layouts in one pool, the published splits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.core import ChunkedLocalAttentionSpec, FullAttentionSpec, MLAAttentionSpec, SlidingWindowMLASpec
from kvjax.core.spec import KVCacheSpec
from kvjax.planning import group_layers
from kvjax.planning.spec_rules import promoted
from tests.planning.test_plan import full, layers, window


def test_five_windows_to_one_full_make_equal_groups() -> None:
    """62 layers, every sixth full, as in Gemma 3 27B: 52 windowed layers split into six tables beside ten full ones."""
    specs = {f"layers.{i}": full() if (i + 1) % 6 == 0 else window() for i in range(62)}
    groups = group_layers(specs, platform="cpu")
    assert [len(group.layer_names) for group in groups] == [9, 9, 9, 9, 8, 8, 10]
    assert [group.pool_id for group in groups] == [0] * 7
    windowed = [name for name, spec in specs.items() if spec == window()]
    assert groups[0].layer_names == tuple(windowed[0::6])


@pytest.mark.parametrize(
    ("num_full", "num_window", "sizes"), [(10, 14, [10, 14]), (10, 15, [10, 8, 7]), (4, 4, [4, 4])]
)
def test_buckets_of_similar_length_are_not_split(num_full: int, num_window: int, sizes: list[int]) -> None:
    groups = group_layers(layers((num_full, full()), (num_window, window())), platform="cpu")
    assert [len(group.layer_names) for group in groups] == sizes


def test_a_layout_of_its_own_makes_a_pool_and_is_not_split() -> None:
    groups = group_layers(layers((4, full()), (20, window(num_kv_heads=2))), platform="cpu")
    assert [(len(group.layer_names), group.pool_id) for group in groups] == [(4, 0), (20, 1)]


def test_without_hybrid_all_layers_share_one_table() -> None:
    groups = group_layers(layers((4, full()), (20, window())), platform="cpu", hybrid=False)
    assert [len(group.layer_names) for group in groups] == [24]
    assert groups[0].spec == full()


def test_without_hybrid_a_common_window_stays_in_the_spec() -> None:
    (group,) = group_layers(layers((20, window(512))), platform="cpu", hybrid=False)
    assert group.spec.kind == "full_attention"
    assert group.spec.sliding_window == 512


@given(
    kinds=st.lists(st.sampled_from([full(), full(2), window(64), window(128), window(64, 2)]), min_size=1, max_size=40)
)
def test_groups_partition_the_layers(kinds: list[KVCacheSpec]) -> None:
    specs = {f"layers.{i}": spec for i, spec in enumerate(kinds)}
    groups = group_layers(specs, platform="cpu")
    assert sorted(name for group in groups for name in group.layer_names) == sorted(specs)
    for group in groups:
        assert {specs[name] for name in group.layer_names} == {group.spec}
    layouts = {group.pool_id: set() for group in groups}
    for group in groups:
        layouts[group.pool_id].add(group.spec.page_layout("cpu"))
    assert all(len(found) == 1 for found in layouts.values())
    assert sorted(layouts) == list(range(len(layouts)))


def test_promoted_kinds_keep_every_token_and_their_mask() -> None:
    heads: dict[str, Any] = {"num_kv_heads": 2, "head_size": 8, "dtype": "bfloat16"}
    chunked = ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=64, **heads)
    assert promoted(chunked) == FullAttentionSpec(block_size=16, attention_chunk_size=64, **heads)
    latent: dict[str, Any] = {"block_size": 64, "head_size": 8, "dtype": "bfloat16", "tokens_per_state": 4}
    window_mla = SlidingWindowMLASpec(sliding_window=128, page_alignment=576, **latent)
    assert promoted(window_mla) == MLAAttentionSpec(sliding_window=128, page_alignment=576, **latent)
    assert promoted(MLAAttentionSpec(**latent)) == MLAAttentionSpec(**latent)


def test_promoted_latent_layers_share_the_table_of_the_others() -> None:
    latent: dict[str, Any] = {"block_size": 64, "head_size": 8, "dtype": "bfloat16"}
    specs = {"a": MLAAttentionSpec(**latent), "b": SlidingWindowMLASpec(sliding_window=128, **latent)}
    assert [group.layer_names for group in group_layers(specs, platform="cpu")] == [("a",), ("b",)]
    assert [group.layer_names for group in group_layers(specs, platform="cpu", hybrid=False)] == [("a", "b")]

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


def test_layers_of_one_table_may_differ_in_heads() -> None:
    """A table of two page shapes and no other layers: one group, one pool."""
    groups = group_layers(layers((4, full()), (2, full(2))), platform="cpu")
    assert [(len(group.layer_names), group.pool_id) for group in groups] == [(6, 0)]
    assert groups[0].layer_specs == (full(),) * 4 + (full(2),) * 2


def test_a_table_of_several_layouts_leads_with_the_one_it_shares() -> None:
    """A drafting layer of fewer heads among the full layers costs the windows' ids an eighth of a page more."""
    groups = group_layers(layers((1, full(2)), (4, full()), (20, window())), platform="cpu")
    assert [(len(group.layer_names), group.pool_id) for group in groups] == [(5, 0)] + [(4, 0)] * 5
    assert groups[0].layer_names == ("layers.1", "layers.2", "layers.3", "layers.4", "layers.0")


def test_a_table_that_would_make_every_id_dearer_has_a_pool_of_its_own() -> None:
    """Four pages of 8 heads and ten of 4 cost 9 pages of 8; a window would use 4 of them."""
    groups = group_layers(layers((4, full()), (10, full(4)), (20, window())), platform="cpu")
    assert [(len(group.layer_names), group.pool_id) for group in groups] == [(14, 0), (20, 1)]


def test_the_narrowest_group_decides_whether_a_table_of_several_layouts_joins() -> None:
    """Windows of 128 tokens in one layer only: each of its ids would take four pages more."""
    specs = layers((1, full(2)), (4, full()), (4, window(64)), (1, window(128)))
    groups = group_layers(specs, platform="cpu")
    assert [(len(group.layer_names), group.pool_id) for group in groups] == [(5, 0)] + [(1, 1)] * 5


def test_one_table_of_several_layouts_joins_a_pool() -> None:
    """Behind the columns that both have in common, two would want different pages of one column."""
    specs = layers((4, full()), (1, full(2)), (4, window(64)), (1, window(64, 4)), (4, window(128)))
    groups = group_layers(specs, platform="cpu")
    assert [(len(group.layer_names), group.pool_id) for group in groups] == [(5, 0), (4, 0), (5, 1)]


kinds_of_layers = st.sampled_from([full(), full(2), window(64), window(128), window(64, 2)])


@given(kinds=st.lists(kinds_of_layers, min_size=1, max_size=40), platform=st.sampled_from(["cpu", "tpu"]))
def test_groups_partition_the_layers(kinds: list[KVCacheSpec], platform: str) -> None:
    specs = {f"layers.{i}": spec for i, spec in enumerate(kinds)}
    groups = group_layers(specs, platform=platform)
    assert sorted(name for group in groups for name in group.layer_names) == sorted(specs)
    columns: dict[tuple[int, int], object] = {}
    for group in groups:
        assert group.layer_specs == tuple(specs[name] for name in group.layer_names)
        assert {spec.table_key for spec in group.layer_specs} == {group.spec.table_key}
        for place, spec in enumerate(group.layer_specs):
            layout = spec.page_layout(platform)
            assert columns.setdefault((group.pool_id, place), layout) == layout
    assert sorted({group.pool_id for group in groups}) == list(range(1 + max(group.pool_id for group in groups)))


def test_masks_in_which_layers_differ_are_none_of_the_table() -> None:
    specs = layers((2, full()), (2, window(64)), (2, window(128)))
    (group,) = group_layers(specs, platform="cpu", hybrid=False)
    assert group.spec == full()
    assert [getattr(spec, "sliding_window", None) for spec in group.layer_specs] == [None] * 2 + [64] * 2 + [128] * 2


def test_promoted_layers_take_the_block_size_of_the_full_ones() -> None:
    specs = layers((2, full(block_size=32)), (2, window(64, block_size=16)))
    assert len(group_layers(specs, platform="cpu")) == 2
    (group,) = group_layers(specs, platform="cpu", hybrid=False)
    assert {spec.block_size for spec in group.layer_specs} == {32}
    two_sizes = layers((2, full(block_size=32)), (2, full(block_size=8)), (2, window(64, block_size=16)))
    groups = group_layers(two_sizes, platform="cpu", hybrid=False)
    assert [group.spec.block_size for group in groups] == [32, 8, 16]
    only_windows = group_layers(layers((2, window(64, block_size=16))), platform="cpu", hybrid=False)
    assert only_windows[0].spec.block_size == 16


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

"""Laws of slabs' sizes: what they waste, whose pages fill them, and what kernels make of it."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.configs import known_models, load_model_config
from kvjax.core import FullAttentionSpec, MambaSpec
from kvjax.device import Placement
from kvjax.device.pages.kv_pages import page_shapes
from kvjax.planning import KVCachePlan, plan_kv_cache
from kvjax.planning.slabs import TOLERATED, common_columns
from pallas_kernels.gpu.places import reason_of_places
from pallas_kernels.slab_pages import SlabArray
from pallas_kernels.tpu.slab_refs import reason_of_slabs

ROW = 512  # bytes
HYBRIDS = [
    "falcon-h1-0.5b",
    "granite-4.0-h-small",
    "jamba-1.5-large",
    "jamba-1.5-mini",
    "kimi-linear-48b-a3b",
    "lfm2-1.2b",
    "nemotron-3-nano-30b-a3b",
    "olmo-hybrid-7b",
    "qwen3-next-80b-a3b",
]
MOST_LEFT = 0.05
LEFT = {("olmo-hybrid-7b", "tpu"): 0.08}  # of a slab of nine blocks of tokens, where a state in whole lanes takes 8.3
GPU_BLOCK = 8  # tokens, of which copies of GPU kernels begin at multiples


def plan_of(model: str, platform: str) -> KVCachePlan:
    specs = load_model_config(model).kv_cache_specs()
    return plan_kv_cache(specs, max_model_len=8_192, memory_bytes=10**11, platform=platform, one_memory=True)


def two_pools(token_rows: int, state_rows: int, platform: str) -> KVCachePlan:
    """A layer of attention with pages of so many rows, and one with such states."""
    specs = {
        "full": FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8 * token_rows, dtype="float32"),
        "state": MambaSpec(block_size=512, shapes=((state_rows, 128),), dtypes=("float32",), mamba_cache_mode="align"),
    }
    if platform == "tpu":
        specs["full"] = replace(specs["full"], num_kv_heads=token_rows, head_size=128, block_size=8, dtype="bfloat16")
    lengths = {"max_model_len": 2_048, "max_in_flight_tokens": 512}
    return plan_kv_cache(specs, memory_bytes=2**27, platform=platform, one_memory=True, **lengths)


@given(token_rows=st.integers(1, 40), state_rows=st.integers(1, 400), on_tpu=st.booleans())
def test_of_sizes_that_waste_little_the_smallest_that_small_pages_fill(
    token_rows: int, state_rows: int, on_tpu: bool
) -> None:
    """Sizes are multiples of either page, up to twice the larger one, on TPU in tiles of 8 rows."""
    plan = two_pools(token_rows, state_rows, "tpu" if on_tpu else "gpu")
    assert plan.slabs is not None
    pages = [group.pages[0].page_bytes // ROW for group in plan.shape.groups]
    tile = 8 if on_tpu else 1
    largest, smallest = max(pages), min(pages)
    sizes = {ceil(count * page / tile) * tile for page in pages for count in range(1, 2 * largest // page + 1)} - set(
        range(largest)
    )
    needs = plan.shape.needs_of(plan.load, plan.max_model_len, plan.max_in_flight_tokens)
    kept = [float(need.kept_blocks * need.bytes_per_block) for need in needs]

    def waste(size: int) -> float:
        return sum(bytes_ * (size % page / size) for bytes_, page in zip(kept, pages, strict=True)) / sum(kept)

    good = [size for size in sorted(sizes) if waste(size) <= min(map(waste, sizes)) + TOLERATED]
    filled = [size for size in good if size % smallest == 0]
    rows = plan.slabs.bytes_per_slab // ROW
    assert rows == (filled or good)[0]
    assert plan.slabs.blocks_per_slab == tuple(rows // page for page in pages)
    assert plan.slabs.waste == tuple(rows % page / rows for page in pages)


@pytest.mark.parametrize(("token_rows", "state_rows"), [(2, 40), (3, 64), (7, 11)])
def test_requests_fit_beside_the_null_slab_and_tokens_in_flight(token_rows: int, state_rows: int) -> None:
    """As many as fill whole slabs together, at least the longest one, of which each pool has slabs of its own.

    What is kept while nothing runs has all slabs but the null one.
    """
    plan = two_pools(token_rows, state_rows, "gpu")
    assert plan.slabs is not None
    needs = plan.shape.needs_of(plan.load, plan.max_model_len, plan.max_in_flight_tokens)
    counts = plan.slabs.blocks_per_slab
    beside = 1 + sum(ceil((need.fixed_blocks - 1) / count) for need, count in zip(needs, counts, strict=True))
    longest = sum(ceil((need.least_blocks - 1) / count) for need, count in zip(needs, counts, strict=True))
    assert plan.slabs.least_slabs(needs) == 1 + longest
    run = sum(Fraction(need.request_blocks, count) for need, count in zip(needs, counts, strict=True))
    assert plan.slabs.requests_that_fit(needs, beside + int(run * run.denominator)) == run.denominator
    assert plan.slabs.requests_that_fit(needs, beside) == plan.slabs.requests_that_fit(needs, 1) == 0
    left = sum(Fraction(need.kept_blocks) / count for need, count in zip(needs, counts, strict=True))
    kept = plan.slabs.kept(needs, 1 + int(left * left.denominator), plan.load)
    tokens = plan.load.tokens_per_checkpoint
    assert (kept.tokens, kept.checkpoints) == (tokens * left.denominator, left.denominator)


def test_every_hybrid_is_here() -> None:
    specs = {name: load_model_config(name).kv_cache_specs() for name in known_models()}
    assert [name for name in specs if common_columns(specs[name], "gpu", hybrid=True) is not None] == HYBRIDS


@pytest.mark.parametrize("model", HYBRIDS)
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_attention_of_every_hybrid_fills_its_slabs(model: str, platform: str) -> None:
    """And states leave little of them."""
    plan = plan_of(model, platform)
    assert plan.slabs is not None
    of_tokens = [group.group.pool_id for group in plan.shape.groups if not group.group.spec.forgets]
    assert [plan.slabs.waste[pool_id] for pool_id in of_tokens] == [0.0] * len(of_tokens)
    assert max(plan.slabs.waste) <= LEFT.get((model, platform), MOST_LEFT)


@pytest.mark.parametrize("model", HYBRIDS)
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_devices_keep_slabs_as_planned_and_kernels_take_them(model: str, platform: str) -> None:
    """K, V and latents begin with whole blocks of tokens on a GPU, and are seen as arrays of pages on a TPU."""
    plan = plan_of(model, platform)
    assert plan.slabs is not None
    pages = page_shapes(plan.config, Placement.create())
    assert pages.num_bytes == plan.used_bytes
    assert {column.shape[1] for column in pages.arrays} == {plan.slabs.bytes_per_slab // len(pages.arrays) // ROW}
    for group in plan.shape.groups:
        if group.group.spec.forgets:
            continue
        for array in pages.column(group.group.pool_id, 0):
            assert isinstance(array, SlabArray)
            if platform == "gpu":
                assert reason_of_places(array, array.ndim - 2, GPU_BLOCK) is None
            elif platform == "tpu":
                assert reason_of_slabs(array) is None
                assert array.memory.shape[1] == array.place.blocks_per_slab * array.place.page_rows


def test_groups_of_unlike_layers_share_no_memory() -> None:
    """Nor do pools that are one; layers of one size share it with states."""
    narrow = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype="float32")
    state = MambaSpec(block_size=16, shapes=((64, 128),), dtypes=("float32",), mamba_cache_mode="align")
    specs = {"a": narrow, "b": narrow, "state": state}
    assert common_columns(specs, "gpu", hybrid=True) == 1
    assert common_columns(specs | {"b": replace(narrow, head_size=128)}, "gpu", hybrid=True) is None
    assert common_columns({"a": narrow, "b": narrow}, "gpu", hybrid=True) is None

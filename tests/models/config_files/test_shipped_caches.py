"""Caches of shipped models: bytes and groups, by hand or as published."""

from __future__ import annotations

from typing import Any

import pytest

from kvjax.configs import load_model_config
from kvjax.core import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kvjax.planning import plan_kv_cache


def bytes_a_token(name: str) -> int:
    """Of all layers, every token kept."""
    return sum(spec.page_size_bytes // spec.block_size for spec in load_model_config(name).kv_cache_specs().values())


@pytest.mark.parametrize(
    ("name", "published"),
    [
        # "Insights into DeepSeek-V3" (arXiv 2505.09343), table 1: 70.272 KB a token.
        ("deepseek-v3", 70_272),
        # Of its layers, and 128 numbers of two bytes of each layer's indexer.
        ("deepseek-v3.2", 70_272 + 61 * 128 * 2),
        # 36 layers * 8 heads * (64 + 64) * 2 bytes; half of it in windows of 128 tokens (gpt-oss model card, arXiv
        # 2508.10925: 36 layers, 8 KV heads of 64, alternately full and banded of 128).
        ("gpt-oss-120b", 73_728),
        # 48 layers * 8 heads * (128 + 128) * 2 bytes, of both.
        ("llama-4-scout", 196_608),
        ("llama-4-maverick", 196_608),
        # 20 of 35 layers * 2 heads * (256 + 256) * 2 bytes.
        ("gemma-3n-e4b", 40_960),
    ],
)
def test_bytes_of_a_token(name: str, published: int) -> None:
    assert bytes_a_token(name) == published


# Mamba 1: convolution over inner * (4 - 1), recurrence inner * 16. Mamba 2: convolution over (heads * dimension +
# 2 * groups * 128) * (4 - 1), recurrence heads * dimension * 128. Gated delta net: convolution over (2 * 16 * 128 +
# 32 * 128) * (4 - 1), recurrence 32 * 128 * 128. All in two bytes, Nemotron's recurrence in four. A block is the fewest
# multiples of 16 tokens whose attention takes as much, such as 8 * (128 + 128) * 2 and 2 * (256 + 256) * 2 bytes a
# token. For Qwen3-Next vLLM logs "Setting attention block size to 544 tokens" and "Padding mamba page size by 1.49%":
# 544 * 2,048 / 1,097,728 = 1.0149.
STATES = {  # layers with states, of attention, bytes of a state, tokens of its block
    "jamba-1.5-large": (63, 9, 16_384 * (3 + 16) * 2, 160),
    "jamba-1.5-mini": (28, 4, 8_192 * (3 + 16) * 2, 80),
    "qwen3-next-80b-a3b": (36, 12, (8_192 * 3 + 32 * 128 * 128) * 2, 544),
    "granite-4.0-h-small": (36, 4, (8_448 * 3 + 128 * 64 * 128) * 2, 528),
    "nemotron-3-nano-30b-a3b": (23, 6, 6_144 * 3 * 2 + 64 * 64 * 128 * 4, 2_096),
}


@pytest.mark.parametrize("name", STATES)
def test_recurrent_layers_have_a_state_a_block(name: str) -> None:
    recurrent, attention, state_bytes, block_size = STATES[name]
    model = load_model_config(name)
    specs = model.kv_cache_specs()
    states = [spec for spec in specs.values() if isinstance(spec, MambaSpec)]
    full = [spec for spec in specs.values() if isinstance(spec, FullAttentionSpec)]
    assert (len(states), len(full)) == (recurrent, attention)
    assert {(spec.state_bytes, spec.block_size, spec.mamba_cache_mode) for spec in states} == {
        (state_bytes, block_size, "align")
    }
    per_token = full[0].page_size_bytes // 16
    assert (block_size - 16) * per_token < state_bytes <= block_size * per_token
    plan = plan_kv_cache(specs, num_blocks=99, max_model_len=1_024, platform="gpu")
    by_kind = {group.spec.kind: group for group in plan.groups}
    assert by_kind["mamba"].request_blocks == 2
    assert by_kind["mamba"].table_bytes == 4 * -(-1_024 // block_size)
    assert {pool.bytes_per_block for pool in plan.pools} == {recurrent * state_bytes, attention * 16 * per_token}
    # A wider attention cache holds as much in fewer tokens.
    wider = model.kv_cache_specs(32, "float32")
    assert {spec.block_size for spec in wider.values() if isinstance(spec, MambaSpec)} == {
        -(-state_bytes // (2 * per_token) // 32) * 32
    }


@pytest.mark.parametrize(("tensor_parallel", "parts"), [(2, 2), (32, 32), (64, 32)])
def test_states_split_over_devices(tensor_parallel: int, parts: int) -> None:
    """Qwen3-Next has 32 heads of values, and convolves 8,192 numbers: up to 32 devices share them."""
    specs = load_model_config("qwen3-next-80b-a3b").kv_cache_specs()
    plan = plan_kv_cache(specs, num_blocks=99, max_model_len=64, tensor_parallel=tensor_parallel)
    pool = next(pool for pool in plan.pools if plan.groups[pool.group_ids[0]].spec.kind == "mamba")
    assert pool.bytes_per_block == 36 * STATES["qwen3-next-80b-a3b"][2] // parts
    arrays = plan.config.pools[pool.pool_id].columns[0].arrays
    copies = tensor_parallel // parts
    assert [array.page_shape for array in arrays] == [(8_192 * copies, 3), (32 * copies, 128, 128)]
    with pytest.raises(ValueError, match=r"tensor_parallel to divide the 32 parts of a state or .* got 3"):
        plan_kv_cache(specs, num_blocks=99, max_model_len=64, tensor_parallel=3)


def test_a_state_of_kimi_linear_is_worth_the_latents_of_its_block() -> None:
    """Three convolutions of 32 heads of 128 in two bytes, a matrix a head in four; a latent is 512 + 64 numbers."""
    specs = load_model_config("kimi-linear-48b-a3b").kv_cache_specs()
    assert [spec.kind for spec in specs.values()] == [
        "mla_attention" if i in (4, 8, 12, 16, 20, 24, 27) else "mamba" for i in range(1, 28)
    ]
    (state,) = {spec for spec in specs.values() if isinstance(spec, MambaSpec)}
    assert state.state_bytes == 3 * 32 * 128 * 3 * 2 + 32 * 128 * 128 * 4
    assert state.block_size == 1_888 == -(-state.state_bytes // (576 * 2) // 16) * 16


def counts(name: str, **arguments: Any) -> list[tuple[str, int, int, int]]:
    """Per group its kind, layers, block size and pool."""
    model = load_model_config(name)
    plan = plan_kv_cache(model.kv_cache_specs(), num_blocks=999, max_model_len=448, platform="gpu", **arguments)
    return [(g.spec.kind, len(g.layer_names), g.spec.block_size, g.pool_id) for g in plan.groups]


def test_layers_of_gpt_oss_slide_in_turn() -> None:
    specs = list(load_model_config("gpt-oss-120b").kv_cache_specs().values())
    heads: dict[str, Any] = {"block_size": 16, "num_kv_heads": 8, "head_size": 64, "dtype": "bfloat16"}
    assert specs == [SlidingWindowSpec(**heads, sliding_window=128), FullAttentionSpec(**heads)] * 18
    assert counts("gpt-oss-120b") == [("sliding_window", 18, 16, 0), ("full_attention", 18, 16, 0)]


@pytest.mark.parametrize("name", ["llama-4-scout", "llama-4-maverick"])
def test_three_of_four_layers_of_llama_4_are_chunked(name: str) -> None:
    specs = list(load_model_config(name).kv_cache_specs(32, "float8_e4m3fn").values())
    heads: dict[str, Any] = {"block_size": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "float8_e4m3fn"}
    chunked = ChunkedLocalAttentionSpec(**heads, attention_chunk_size=8_192)
    assert specs == [chunked, chunked, chunked, FullAttentionSpec(**heads)] * 12
    assert counts(name) == [("chunked_local_attention", 12, 16, 0)] * 3 + [("full_attention", 12, 16, 0)]


def test_a_whisper_request_holds_its_encoder_tokens() -> None:
    """1,500 encoder tokens in 94 blocks of 16, 448 decoder tokens in 28; a page is 16 * 20 * (64 + 64) * 2 bytes."""
    model = load_model_config("whisper-large-v3")
    plan = plan_kv_cache(model.kv_cache_specs(), num_blocks=16_384, max_model_len=model.max_model_len)
    assert counts("whisper-large-v3") == [("full_attention", 32, 16, 0), ("cross_attention", 32, 16, 0)]
    assert isinstance(plan.groups[1].spec, CrossAttentionSpec)
    assert [group.request_blocks for group in plan.groups] == [28, 94]
    assert [group.table_bytes for group in plan.groups] == [4 * 28, 4 * 94]
    assert plan.groups[0].page_bytes == 81_920
    assert int(plan.concurrency) == 16_383 // (28 + 94)


def test_the_last_layers_of_gemma_3n_read_the_pages_of_others() -> None:
    """15 of 35: the windowed ones those of layer 18, the full ones those of layer 19."""
    model = load_model_config("gemma-3n-e4b")
    specs = model.kv_cache_specs()
    assert list(specs) == [f"layers.{i}" for i in range(20)]
    assert model.shared_layers == {f"layers.{i}": f"layers.{19 if i % 5 == 4 else 18}" for i in range(20, 35)}
    plan = plan_kv_cache(specs, num_blocks=99, max_model_len=64, shared_layers=model.shared_layers)
    index = plan.config.layer_index
    assert len(index) == 35
    assert (index["layers.34"], index["layers.33"]) == (index["layers.19"], index["layers.18"])
    alone = plan_kv_cache(specs, num_blocks=99, max_model_len=64)
    assert plan.used_bytes == alone.used_bytes

"""What is peculiar to DeepSeek V4: its caches, which configs and names of tensors are read, hyper-connections."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from kvjax.configs import load_model_config
from kvjax.core.step.step_plan import StepPlan
from kvjax.device import Bucket, DeviceBatch, KVPages, Placement, StepCache, StepOutput
from kvjax.engine import EngineConfig
from kvjax.errors import CheckpointError, ConfigError
from kvjax.models import LoadedModel, ModelConfig, build_model, load_model
from kvjax.models.configs.deepseek_v4 import CompressionConfig, DeepseekV4Config, HyperConfig
from kvjax.models.layers.hyper_connections import HyperConnection
from kvjax.models.layers.make import Make
from kvjax.models.save import save_weights
from kvjax.planning import plan_kv_cache
from tests.device.serving import Server
from tests.models.families import RecordingEngine, drain, greedy_params
from tests.models.golden_models import goldens_of, model_folder

# Of ARCHITECTURE.md, "DeepSeek V4": layers of the caches in each table, and their bytes by hand.
ENTRY, INDEX_ENTRY = 448 + 2 * 64 + 8, 128 + 4
V4_TABLES = {  # ratio 4, ratio 128 and all layers
    "deepseek-v4-flash": (21, 20, 43, 985_664, 1_607_168, 860_160, 655_360),
    "deepseek-v4-pro": (30, 31, 61, 1_410_928, 2_279_936, 1_228_800, 1_015_808),
}


@pytest.mark.parametrize("name", V4_TABLES)
def test_the_pool_table_of_architecture_md(name: str) -> None:
    ratio_4, ratio_128, num_layers, *block_bytes = V4_TABLES[name]
    by_hand = [
        ratio_4 * 64 * ENTRY + ratio_128 * 2 * ENTRY + ratio_4 * 64 * INDEX_ENTRY,
        num_layers * 64 * ENTRY,
        ratio_4 * 4 * (2 * 2 * 512 + 2 * 2 * 128) * 4,
        ratio_128 * 8 * 2 * 512 * 4,
    ]
    assert by_hand == block_bytes
    specs = load_model_config(name).kv_cache_specs()
    plan = plan_kv_cache(specs, num_blocks=2**12 + 1, max_model_len=2**20, platform="gpu")
    assert [pool.bytes_per_block for pool in plan.pools] == block_bytes
    assert [pool.group_ids for pool in plan.pools] == [(0,), (1,), (2,), (3,)]
    assert [len(group.layer_names) for group in plan.groups] == [
        2 * ratio_4 + ratio_128,
        num_layers,
        2 * ratio_4,
        ratio_128,
    ]
    assert [(group.spec.block_size, getattr(group.spec, "sliding_window", None)) for group in plan.groups] == [
        (256, None),
        (64, 128),
        (4, 8),
        (8, 128),
    ]
    assert [group.request_blocks for group in plan.groups] == [4_096, 3, 3, 17]
    # With 576-byte alignment, as vLLM lays bytes out, there would be three page sizes: 37,440, 8,640 and 1,728.
    pages = {part.page_bytes for group in plan.groups for part in group.pages}
    assert {-(-page // 576) * 576 for page in pages if page < 30_000} == {8_640, 1_728}
    assert max(pages) <= 37_440


def test_without_hybrid_there_is_one_table() -> None:
    specs = load_model_config("deepseek-v4-flash").kv_cache_specs()
    plan = plan_kv_cache(specs, num_blocks=99, max_model_len=512, platform="gpu", hybrid=False)
    (group,) = plan.groups
    assert (group.spec.kind, group.spec.block_size, len(group.layer_names)) == ("mla_attention", 256, len(specs))
    masks = {spec.sliding_window for spec in plan.shape.groups[0].group.layer_specs}
    assert masks == {None, 8, 128}


def test_caches_in_bfloat16() -> None:
    specs = load_model_config("deepseek-v4-flash").kv_cache_specs(512, "bfloat16")
    assert specs["layers.2.compressed"].page_size_bytes == 128 * 512 * 2
    assert specs["layers.2.indexer"].page_size_bytes == 128 * 128 * 2
    assert specs["layers.2.states"] == load_model_config("deepseek-v4-flash").kv_cache_specs()["layers.2.states"]
    with pytest.raises(ValueError, match=r"block_size to be a multiple of 128 \(all compression ratios\), got 192"):
        load_model_config("deepseek-v4-flash").kv_cache_specs(192)


def golden_config(**changes: Any) -> dict[str, Any]:
    """Of the tiny model; a change to `...` removes the key."""
    config: dict[str, Any] = json.loads((model_folder("deepseek_v4") / "config.json").read_text())
    return {key: value for key, value in (config | changes).items() if value is not ...}


def parsed(**changes: Any) -> DeepseekV4Config:
    config = ModelConfig.from_dict(golden_config(**changes), where="here")
    assert isinstance(config, DeepseekV4Config)
    return config


INDEXED, POOLED = CompressionConfig(ratio=4, is_indexed=True), CompressionConfig(ratio=128, is_indexed=False)


def test_the_published_config_is_read() -> None:
    """Keys of the Hub's file, which are older than those of transformers; its caches are fp8 as its weights are."""
    config: Any = load_model_config("deepseek-v4-flash")
    assert config.compression[:4] == (None, None, INDEXED, POOLED)
    assert len(config.compression) == config.num_layers == 43
    assert (config.rope_dim, config.rope.theta, config.rope_compressed.theta) == (64, 10_000, 160_000)
    assert (config.rope.rope_type, config.rope_compressed.rope_type) == ("default", "yarn")
    assert (config.rope_compressed.factor, config.rope_compressed.attention_factor) == (16, 1.0)
    assert config.hashed_layers == (True,) * 3 + (False,) * 40
    assert (config.experts.score, config.experts.limit, config.experts.scale) == ("sqrtsoftplus", 10.0, 1.5)
    assert (config.dtype, config.cache_dtype) == ("bfloat16", "float8_e4m3fn")
    assert config.cache_words == "a latent of 512, 21 layers / 4, 20 layers / 128"
    config.check_split(8)
    with pytest.raises(ValueError, match="expected query heads to divide over 3 devices, got 64"):
        config.check_split(3)


def test_caches_of_latents_that_groups_of_fp8_do_not_divide_are_plain(tmp_path: Path) -> None:
    """A latent of 8 plain numbers and 8 rotary ones, of a checkpoint in fp8."""
    config = json.loads((model_folder("deepseek_v4") / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model_config(str(tmp_path)).cache_dtype == "float32"


def test_older_keys_mean_what_newer_ones_do() -> None:
    newer = parsed()
    rope = {"type": "yarn", "factor": 8.0, "beta_fast": 8.0, "beta_slow": 1.0, "original_max_position_embeddings": 64}
    older = parsed(
        layer_types=..., compress_rates=..., compress_ratios=[0, 4, 128, 0, 4, 128, 0], mlp_layer_types=...,
        num_hash_layers=2, rope_parameters=..., rope_scaling=rope, partial_rotary_factor=...,
    )  # fmt: skip
    assert older == newer


def test_defaults_are_those_of_transformers() -> None:
    config = parsed(layer_types=..., mlp_layer_types=..., partial_rotary_factor=..., qk_rope_head_dim=..., head_dim=512)
    assert config.compression == (POOLED, POOLED, POOLED, INDEXED, POOLED, INDEXED)
    assert config.hashed_layers == (True, True, True, False, False, False)
    plain = parsed(rope_parameters=..., partial_rotary_factor=..., qk_rope_head_dim=..., head_dim=512)
    assert (plain.rope_dim, plain.rope_compressed.rope_type, plain.rope_compressed.theta) == (64, "default", 40_000)


def test_a_layer_has_the_caches_of_its_sort() -> None:
    specs = parsed(num_hidden_layers=2, layer_types=["sliding_attention", "compressed_sparse_attention"],
                   mlp_layer_types=["moe", "moe"]).kv_cache_specs()  # fmt: skip
    assert set(specs) == {
        "layers.0.window", "layers.1.window", "layers.1.compressed", "layers.1.indexer", "layers.1.states",
        "layers.1.indexer_states",
    }  # fmt: skip
    windows = parsed(num_hidden_layers=1, layer_types=["sliding_attention"], mlp_layer_types=["moe"])
    assert set(windows.kv_cache_specs(100)) == {"layers.0.window"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ..., "compress_ratios": [0]}, r"among \[0, 4, 128\] for each of 6 layers, got \[0\]"),
        ({"layer_types": ..., "compress_ratios": [0, 8] * 3}, r"among \[0, 4, 128\] for each of 6 layers, got \[0, 8"),
        ({"layer_types": ..., "compress_ratios": "4"}, "'compress_ratios' to be a list of integers >= 0, got '4'"),
        ({"layer_types": ..., "compress_ratios": [-1] * 6}, "a list of integers >= 0, got"),
        ({"layer_types": ["full_attention"] * 6}, "layer_types among sliding_attention, compressed_sparse_attention"),
        ({"mlp_layer_types": ["dense"] * 6}, "expected mlp_layer_types among hash_moe, moe for each of 6 layers"),
        ({"o_groups": 3}, "here: expected o_groups to divide 8 heads, got 3"),
        ({"num_key_value_heads": 2}, "here: expected 'num_key_value_heads' to be 1, got 2"),
        ({"n_shared_experts": 2}, "here: expected 'n_shared_experts' to be 1, got 2"),
        ({"norm_topk_prob": False}, "expected 'norm_topk_prob' to be true, got false"),
        ({"attention_bias": True}, "'attention_bias' to be null or false, got True: DeepSeek V4 has no biases"),
        ({"scoring_func": "cosine"}, "'scoring_func' among softmax, sigmoid, sqrtsoftplus, got 'cosine'"),
    ],
)
def test_configs_that_mean_something_else_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(**changes)


# How transformers 5 writes a tensor's name, and what the Hub's checkpoints have.
HUB_NAMES = {
    r"^model\.embed_tokens\.": "embed.",
    r"^model\.": "",
    r"^hc_head\.hc_": "hc_head_",
    r"\.attn\.norm\.": ".attn.kv_norm.",
}


@pytest.fixture
def hub_folder(tmp_path: Path) -> Path:
    """A writable copy of the tiny model, its tensors named as on the Hub."""
    folder = tmp_path / "deepseek_v4_sparse"
    shutil.copytree(model_folder("deepseek_v4_sparse"), folder)
    tensors = load_file(folder / "model.safetensors")
    for pattern, hub in HUB_NAMES.items():
        tensors = {re.sub(pattern, hub, name): tensor for name, tensor in tensors.items()}
    assert {"embed.weight", "head.weight", "hc_head_scale", "layers.1.attn.kv_norm.weight"} <= set(tensors)
    save_file(tensors | {"mtp.0.norm.weight": np.zeros(2, np.float32)}, folder / "model.safetensors")
    return folder


def test_names_of_the_hub_load_as_those_of_transformers(hub_folder: Path) -> None:
    ours, hubs = (load_model(folder, "float32").module for folder in (model_folder("deepseek_v4_sparse"), hub_folder))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(ours), nnx.state(hubs))


def test_what_is_saved_loads_as_the_same_weights(hub_folder: Path) -> None:
    """Tables of experts, whose ids may be beyond what bfloat16 holds, among them."""
    before: Any = load_model(hub_folder, "float32").module
    table = before.layers[0].ffn.gate.tid2eid
    table[...] = table[...].at[0, 0].set(1025)
    save_weights(before, hub_folder)
    after = load_model(hub_folder, "float32").module
    jax.tree.map(np.testing.assert_array_equal, nnx.state(before), nnx.state(after))


def test_scales_of_which_the_config_says_nothing_are_refused(hub_folder: Path) -> None:
    tensors = load_file(hub_folder / "model.safetensors")
    save_file(tensors | {"layers.0.attn.wq_a.scale": np.ones(1, np.float32)}, hub_folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"got none beside 1 weights .* \(layers\.0\.attn\.wq_a\.scale\)"):
        load_model(hub_folder, "float32")


def test_what_decides_or_mixes_stays_in_float32_and_tables_of_experts_in_integers() -> None:
    module: Any = load_model(model_folder("deepseek_v4"), "bfloat16").module
    first, last = module.layers[0], module.layers[5]
    for param in (first.hc_attn.fn, first.attn.attn_sink, last.attn.compressor.ape, module.hc_head.base):
        assert param[...].dtype == jnp.float32
    assert last.ffn.gate.e_score_correction_bias[...].dtype == jnp.float32
    assert first.ffn.gate.tid2eid[...].dtype == jnp.int32
    assert first.attn.wq_a.kernel[...].dtype == jnp.bfloat16


@pytest.mark.parametrize("num_streams", [1, 4])
def test_streams_mix_without_growing(num_streams: int) -> None:
    """Rows and columns of the mixing matrix sum up to 1, so a constant over streams stays what it is."""
    size, config = 6, HyperConfig(num_streams=num_streams, num_iterations=20, eps=1e-6)
    make = Make(jnp.dtype("float32"), nnx.Rngs(0))
    module = HyperConnection(size, config, norm_eps=1e-6, make=make)
    module.scales[...] = jnp.ones(3)
    streams = jax.random.normal(jax.random.key(1), (5, num_streams, size))
    read, mixing = module.split(streams)
    assert read.shape == (5, size)
    np.testing.assert_allclose(mixing.mix.sum(axis=1), 1.0, atol=1e-4)
    np.testing.assert_allclose(mixing.mix.sum(axis=2), 1.0, atol=1e-4)
    assert float(mixing.mix.min()) >= 0
    constant = jnp.broadcast_to(streams[:, :1], streams.shape)
    np.testing.assert_allclose(module.join(jnp.zeros((5, size)), mixing, constant), constant, atol=1e-3)
    out = jnp.ones((5, size))
    added = module.join(out, mixing, jnp.zeros_like(streams))
    np.testing.assert_allclose(added, np.broadcast_to(mixing.spread[:, :, None], added.shape), rtol=1e-6)


@pytest.mark.sweep
def test_fp8_caches_give_nearly_the_same_logits() -> None:
    """Entries of bytes: 64 numbers with a scale, 64 rotary ones in bfloat16; keys of the indexer with one scale."""
    sizes = {"head_dim": 128, "qk_rope_head_dim": 64, "index_head_dim": 64}
    config = parsed(**sizes)
    model = LoadedModel(config, build_model(config, dtype="float32", rngs=nnx.Rngs(0)), None)
    logits = {}
    for dtype in ("float32", "float8_e4m3fn"):
        settings = EngineConfig(
            block_size=128, num_blocks=200, max_model_len=240, max_num_seqs=2, max_num_batched_tokens=64, max_buckets=1,
            dtype=dtype,
        )  # fmt: skip
        engine = RecordingEngine(model, settings)
        dtypes = {leaf.dtype for leaf in jax.tree.leaves(engine._runner.pages)}
        assert dtypes == ({jnp.dtype("float32")} | ({jnp.dtype("int8")} if dtype != "float32" else set()))
        request_id = engine.add_request(goldens_of("deepseek_v4")[2].prompt, greedy_params(1))
        drain(engine)
        logits[dtype] = engine.logits[request_id][0]
    close, same = logits["float8_e4m3fn"], logits["float32"]
    assert 0 < np.abs(close - same).max() < 0.3 * same.std()
    assert np.corrcoef(close, same)[0, 1] > 0.995


class ShapesOnly:
    """A cache that gives outputs of the right shapes and dtypes, to trace layers without kernels."""

    def attend_latent(self, layer_name: str, q_nope: jax.Array, *others: Any) -> jax.Array:
        return jnp.zeros_like(q_nope)

    def compress(
        self, layer_name: str, kv: jax.Array, scores: jax.Array, bias: jax.Array, finish: Any, *, states: str
    ) -> None:
        dim = kv.shape[1] // (1 if bias.shape[0] == 128 else 2)
        finish(jnp.zeros((5, dim), jnp.float32), jnp.zeros(5, jnp.int32))

    def pick_entries(self, layer_name: str, q: jax.Array, weights: jax.Array, topk: int) -> jax.Array:
        return jnp.zeros((q.shape[0], topk), jnp.int32)

    def attend_compressed(
        self, layer_name: str, q: jax.Array, *others: Any, compressed: str | None = None
    ) -> jax.Array:
        return jnp.zeros_like(q)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "deepseek_v4"])
def test_strict_promotion_of_dtypes_and_ranks_is_enough(name: str) -> None:
    config = ModelConfig.from_folder(model_folder(name))

    def forward(token_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        module = build_model(config, dtype="bfloat16", rngs=nnx.Rngs(0))
        hidden = module(token_ids, jnp.arange(20), ShapesOnly())
        return hidden, module.logits(hidden)

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        hidden, logits = jax.eval_shape(forward, jnp.arange(20))
    assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)


class PickingCache(StepCache):
    """Remembers which entries the indexers picked."""

    picked: tuple[jax.Array, ...] = ()

    def pick_entries(self, layer_name: str, q: jax.Array, weights: jax.Array, topk: int) -> jax.Array:
        """As the cache does."""
        picked = super().pick_entries(layer_name, q, weights, topk)
        self.picked = (*self.picked, picked)
        return picked


class PickingStep:
    """A step of one request that keeps what its indexers picked: int32[indexers, tokens, topk] of each step."""

    def __init__(self, module: Any, max_num_tokens: int) -> None:
        self.kv_cache_config = plan_kv_cache(
            module.config.kv_cache_specs(128), num_blocks=100, max_model_len=240, max_in_flight_tokens=max_num_tokens
        ).config
        self.placement = Placement.create()
        self.bucket = Bucket(max_num_tokens, 1, 60)
        self.picked: list[np.ndarray] = []
        self._run = jax.jit(lambda pages, batch: self._update(module, pages, batch))

    def _update(self, module: Any, pages: KVPages, batch: DeviceBatch) -> tuple[KVPages, jax.Array, jax.Array]:
        cache = PickingCache(pages, batch, self.kv_cache_config)
        hidden = module(batch.token_ids, batch.positions, cache)
        return cache.pages, module.logits(hidden[batch.logits_indices]), jnp.stack(cache.picked)

    def __call__(self, pages: KVPages, plan: StepPlan) -> StepOutput:
        pages, logits, picked = self._run(pages, DeviceBatch.from_plan(plan, self.bucket))
        self.picked.append(np.asarray(picked)[:, : plan.num_tokens])
        no_tokens = jnp.zeros(1, jnp.int32)
        return StepOutput(pages, logits, no_tokens, None, no_tokens, no_tokens)


@pytest.mark.parametrize("max_num_tokens", [200, 7])
def test_indexers_pick_what_hugging_face_does(max_num_tokens: int) -> None:
    """Wherever the last picked and the first refused score differ by more than 1e-5, which is everywhere here."""
    module: Any = load_model(model_folder("deepseek_v4_sparse"), "float32").module
    golden = goldens_of("deepseek_v4_sparse")[2]
    step: Any = PickingStep(module, max_num_tokens)
    Server(step, 4, 240).run({"request": golden.prompt.tolist()}, 1, max_num_tokens)
    picked = np.sort(np.concatenate(step.picked, axis=1), axis=-1)
    topk = picked.shape[-1]
    scores = np.sort(golden.extras["index_scores"], axis=-1)[..., ::-1]
    with np.errstate(invalid="ignore"):
        gaps = scores[..., topk - 1] - scores[..., topk]
    assert not (gaps <= 1e-5).any()
    np.testing.assert_array_equal(picked, golden.extras["indices"])
    assert (picked[:, :24] == -1).any()
    assert (picked[:, 24:] >= 0).all()
    refused = golden.extras["index_scores"].shape[-1] - topk
    assert refused > 40

"""Laws of configs: the shipped ones are what their models are, and every bad one is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvjax.configs import known_deployments, known_models, load_deployment, load_model_config
from kvjax.errors import ConfigError
from kvjax.planning import plan_kv_cache

SHAPES = {  # layers, KV heads, head size, full-attention layers, window
    "llama-3-8b": (32, 8, 128, 32, None),
    "llama-3-70b": (80, 8, 128, 80, None),
    "qwen3-8b": (36, 8, 128, 36, None),
    "qwen3-235b-a22b": (94, 4, 128, 94, None),
    "qwen3-vl-235b-a22b": (94, 4, 128, 94, None),
    "gemma-3-27b": (62, 16, 128, 10, 1_024),
    "gemma-2-9b": (42, 8, 256, 21, 4_096),
    "mistral-7b": (32, 8, 128, 0, 4_096),
    "mixtral-8x7b": (32, 8, 128, 32, None),
    "phi-3-mini-4k": (32, 32, 96, 0, 2_047),
    "qwen2.5-7b": (28, 4, 128, 28, None),
}
SIZES = {  # query heads, hidden and MLP size, vocabulary, longest request, rotary base
    "llama-3-8b": (32, 4_096, 14_336, 128_256, 8_192, 500_000),
    "llama-3-70b": (64, 8_192, 28_672, 128_256, 8_192, 500_000),
    "qwen3-8b": (32, 4_096, 12_288, 151_936, 40_960, 1_000_000),
    "qwen3-235b-a22b": (64, 4_096, 12_288, 151_936, 40_960, 1_000_000),
    "qwen3-vl-235b-a22b": (64, 4_096, 12_288, 151_936, 262_144, 5_000_000),
    "gemma-3-27b": (32, 5_376, 21_504, 262_208, 131_072, 1_000_000),
    "gemma-2-9b": (16, 3_584, 14_336, 256_000, 8_192, 10_000),
    "mistral-7b": (32, 4_096, 14_336, 32_000, 32_768, 10_000),
    "mixtral-8x7b": (32, 4_096, 14_336, 32_000, 32_768, 1_000_000),
    "phi-3-mini-4k": (32, 3_072, 8_192, 32_064, 4_096, 10_000),
    "qwen2.5-7b": (28, 3_584, 18_944, 152_064, 32_768, 1_000_000),
}


CACHES = {  # layers, caches of their own, longest request, dtype of the cache
    "deepseek-v3": (61, 61, 163_840, "bfloat16"),
    "deepseek-v3.2": (61, 61 + 61, 163_840, "bfloat16"),
    "deepseek-v4-flash": (43, 43 + 41 + 21 + 41 + 21, 1_048_576, "float8_e4m3fn"),
    "deepseek-v4-pro": (61, 61 + 61 + 30 + 61 + 30, 1_048_576, "float8_e4m3fn"),
    "gemma-3n-e4b": (35, 20, 32_768, "bfloat16"),
    "glm-5.2": (78, 78 + 3 + 18, 1_048_576, "bfloat16"),
    "gpt-oss-120b": (36, 36, 131_072, "bfloat16"),
    "llama-4-maverick": (48, 48, 1_048_576, "bfloat16"),
    "llama-4-scout": (48, 48, 10_485_760, "bfloat16"),
    "whisper-large-v3": (32, 64, 448, "float16"),
}


HYBRID = {  # layers, caches of their own, longest request, what a token's cache is made of
    "falcon-h1-0.5b": (36, 36 + 36, 16_384, "2 KV heads of 64 and a state in each layer"),
    "granite-4.0-h-small": (40, 40, 131_072, "8 KV heads of 128, 36 layers with states"),
    "jamba-1.5-large": (72, 72, 262_144, "8 KV heads of 128, 63 layers with states"),
    "jamba-1.5-mini": (32, 32, 262_144, "8 KV heads of 128, 28 layers with states"),
    "kimi-linear-48b-a3b": (27, 27, 1_048_576, "a latent of 576, 20 layers with states"),
    "lfm2-1.2b": (16, 16, 128_000, "8 KV heads of 64, 10 layers with states"),
    "mamba-codestral-7b": (64, 64, 1_048_576, "64 layers with states"),
    "nemotron-3-nano-30b-a3b": (52, 6 + 23, 262_144, "2 KV heads of 128, 23 layers with states"),
    "olmo-hybrid-7b": (32, 32, 65_536, "30 KV heads of 128, 24 layers with states"),
    "qwen3-next-80b-a3b": (48, 48, 262_144, "2 KV heads of 256, 36 layers with states"),
}


@pytest.mark.parametrize("name", HYBRID)
def test_models_with_recurrent_layers_have_their_caches(name: str) -> None:
    model = load_model_config(name)
    found = (model.num_layers, len(model.kv_cache_specs()), model.max_model_len, model.cache_words)
    assert found == HYBRID[name]
    assert model.dtype == "bfloat16"


@pytest.mark.parametrize("name", CACHES)
def test_shipped_models_of_other_caches_have_theirs(name: str) -> None:
    model = load_model_config(name)
    assert (model.num_layers, len(model.kv_cache_specs()), model.max_model_len, model.cache_dtype) == CACHES[name]


@pytest.mark.parametrize("name", SHAPES)
def test_shipped_models_have_their_shapes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_model_config(name)
    full = sum(kind == "full_attention" for kind in config.layer_types)
    shape = (config.num_layers, config.num_kv_heads, config.head_dim, full, config.sliding_window)
    assert shape == SHAPES[name]
    sizes = (config.num_q_heads, config.hidden_size, config.intermediate_size, config.vocab_size, config.max_model_len)
    assert (*sizes, config.rope.theta) == SIZES[name]
    assert config.dtype == "bfloat16"


def test_windows_and_rotary_embeddings_of_gemma_alternate() -> None:
    config = load_model_config("gemma-3-27b")
    full = [layer for layer, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert full == list(range(5, 62, 6))
    assert (config.rope.rope_type, config.rope.factor, config.sm_scale) == ("linear", 8.0, 168**-0.5)
    assert config.rope_local is not None
    assert (config.rope_local.rope_type, config.rope_local.theta) == ("default", 10_000)


def test_nothing_else_is_shipped() -> None:
    assert known_models() == sorted([*SHAPES, *CACHES, *HYBRID])


def test_unknown_models_are_listed() -> None:
    with pytest.raises(
        ConfigError, match=r"expected a model's name \(deepseek-v3, .*qwen3-vl-235b-a22b, .*\), .*got 'gpt'"
    ):
        load_model_config("gpt")


def test_a_folder_and_a_file_are_models_too(tmp_path: Path) -> None:
    config = load_model_config("qwen3-8b")
    source = next(p for p in Path(__file__).parent.parent.glob("configs/models/qwen3-8b.json"))
    file = tmp_path / "config.json"
    file.write_text(source.read_text())
    assert load_model_config(tmp_path) == config
    assert load_model_config(str(file)) == config


def test_a_folder_without_a_config_hides_no_shipped_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-8b").mkdir()
    (tmp_path / "results").mkdir()
    assert load_model_config("qwen3-8b").num_layers == 36
    with pytest.raises(ConfigError, match=r"expected a Hugging Face model folder with config\.json"):
        load_model_config("results")


@pytest.mark.parametrize(("text", "message"), [("{", "expected JSON, got"), ("[]", "expected a JSON object, got list")])
def test_model_files_that_are_no_json_objects_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "model.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(str(file)) + f": {message}"):
        load_model_config(file)


def test_unknown_keys_of_a_model_are_refused(tmp_path: Path) -> None:
    source = Path(__file__).parent.parent / "configs" / "models" / "llama-3-8b.json"
    file = tmp_path / "model.json"
    file.write_text(json.dumps(json.loads(source.read_text()) | {"kv_lora_rank": 512}))
    with pytest.raises(ConfigError, match="kv_lora_rank"):
        load_model_config(file)


@pytest.mark.parametrize("name", CACHES)
def test_unknown_keys_of_a_planned_model_are_refused(tmp_path: Path, name: str) -> None:
    source = Path(__file__).parent.parent / "configs" / "models" / f"{name}.json"
    file = tmp_path / "config.json"
    data = json.loads(source.read_text())
    file.write_text(json.dumps(data | {"surprise": 1}))
    with pytest.raises(ConfigError, match=f"{re.escape(str(file))}: unknown keys surprise"):
        load_model_config(tmp_path)
    if "text_config" in data:
        data["text_config"]["kv_lora_rank"] = 512
        file.write_text(json.dumps(data))
        with pytest.raises(ConfigError, match="text_config: unknown keys kv_lora_rank"):
            load_model_config(file)


def test_unknown_architectures_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"architectures": ["BertModel"]}')
    with pytest.raises(ConfigError, match=r"the architectures .*Deepseek.*, Llama.*, Qwen.*, got \['BertModel'\]"):
        load_model_config(file)


@pytest.mark.parametrize("name", known_deployments())
def test_shipped_deployments_can_be_planned(name: str) -> None:
    deployment = load_deployment(name)
    specs = load_model_config(deployment.model).kv_cache_specs(deployment.block_size, deployment.dtype)
    plan = plan_kv_cache(
        specs,
        memory_bytes=deployment.memory_bytes,
        max_model_len=deployment.max_model_len,
        platform=deployment.platform,
        tensor_parallel=deployment.tensor_parallel or 1,
        request_len=deployment.request_len,
    )
    assert plan.concurrency >= 1


def test_unknown_deployments_are_listed() -> None:
    with pytest.raises(ConfigError, match=r"expected a deployment's name \(.*llama-3-70b-56gib.*got 'nowhere'"):
        load_deployment("nowhere")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memory = ", "expected TOML, got"),
        ("memry = '1GiB'", r"unknown keys memry; expected some of block_size, .*dtype, .*memory, model"),
        ("block_size = 0", "expected block_size >= 1, got 0"),
        ("max_model_len = -1", "expected max_model_len >= 1, got -1"),
        ("block_size = '16'", "expected block_size to be of type int, got '16'"),
        ("hybrid = 1", "expected hybrid to be of type bool, got 1"),
        ("memory = 1.5", "expected memory to be a number of bytes or a text, got 1.5"),
        ("memory = '56X'", "memory: expected a size in bytes"),
    ],
)
def test_bad_deployments_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "d.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(str(file)) + ": " + message):
        load_deployment(file)

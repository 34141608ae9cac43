"""Loading folders: one file or several, wrong tensors named, tokenizers, equal results on a mesh."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from kvjax.engine import EngineConfig, LLMEngine, SamplingParams
from kvjax.errors import CheckpointError, ConfigError, MissingExtraError
from kvjax.extras import require_extra
from kvjax.models import DenseAttention, ModelConfig, Tokenizer, load_model
from kvjax.models.layers.language_model import LanguageModel
from kvjax.models.layers.rotary import inverse_frequencies
from kvjax.models.save import save_weights
from tests.models.golden_models import goldens_of, model_folder


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    """A writable copy of the tiny Qwen3."""
    folder = tmp_path / "qwen3"
    shutil.copytree(model_folder("qwen3"), folder)
    return folder


def change_tensors(folder: Path, changes: dict[str, np.ndarray | None]) -> None:
    """Rewrites model.safetensors; None removes a tensor."""
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / "model.safetensors")


def split_checkpoint(folder: Path) -> None:
    """Makes two files and an index of model.safetensors."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def last_logits(folder: Path, dtype: str = "float32") -> np.ndarray:
    module = load_model(folder, dtype).module
    prompt = goldens_of("qwen3")[3].prompt
    forward = jax.jit(lambda tokens: module.logits(module(tokens, jnp.arange(tokens.size), DenseAttention())[-1:]))
    return np.asarray(forward(jnp.asarray(prompt)))[0]


def test_a_checkpoint_in_several_files_is_the_same_model(qwen3: Path) -> None:
    one_file = last_logits(qwen3)
    split_checkpoint(qwen3)
    np.testing.assert_array_equal(last_logits(qwen3), one_file)
    (qwen3 / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"expected weights in safetensors files, found no .*00002-of-00002"):
        load_model(qwen3)
    (qwen3 / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json: expected a JSON object with a weight_map, got KeyError"):
        load_model(qwen3)


@functools.cache
def weights_of_qwen3() -> Any:
    """As one file has them."""
    return nnx.to_pure_dict(nnx.state(load_model(model_folder("qwen3")).module))


@pytest.mark.parametrize("seed", range(20))
def test_each_tensor_is_read_from_the_file_that_the_index_names(qwen3: Path, seed: int) -> None:
    """Files may hold stale copies of others' tensors, and tensors of nobody; files without an entry do not matter."""
    random = np.random.default_rng(seed)
    tensors = load_file(qwen3 / "model.safetensors")
    (qwen3 / "model.safetensors").unlink()
    files = [f"part-{i}.safetensors" for i in random.permutation(random.integers(1, 6))]
    weight_map = {name: files[random.integers(len(files))] for name in random.permutation(list(tensors))}
    for file in [*files, "consolidated.safetensors"]:
        stale = {name: -tensor for name, tensor in tensors.items() if random.random() < 0.3}
        own = {name: tensors[name] for name, place in weight_map.items() if place == file}
        save_file({**stale, "nobody": np.zeros(3, np.float32), **own}, qwen3 / file)
    (qwen3 / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    chex.assert_trees_all_equal(nnx.to_pure_dict(nnx.state(load_model(qwen3).module)), weights_of_qwen3())


@pytest.mark.parametrize("place", ["../model.safetensors", "/etc/model.safetensors", "a\\b.safetensors", "sub/x", 3])
def test_an_index_names_files_of_its_folder_only(qwen3: Path, place: str | int) -> None:
    index = {"weight_map": {"model.norm.weight": place}}
    (qwen3 / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"expected model\.norm\.weight in a file beside the index, got .*"):
        load_model(qwen3)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 1_000_000,
        '{"weight_map":' * 1_000_000,
        "9" * 5_000,
        "{}",
        "[]",
        '{"weight_map": 3}',
        '{"weight_map": [[1]]}',
    ],
    ids=["deep list", "deep object", "long number", "no map", "list", "number", "list as map"],
)
def test_an_index_of_another_form_is_refused(qwen3: Path, text: str) -> None:
    (qwen3 / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="expected a JSON object with a weight_map, got "):
        load_model(qwen3)


@pytest.mark.parametrize("place", ["", "..", "model-9.safetensors"])
def test_an_index_that_names_no_file_is_refused(qwen3: Path, place: str) -> None:
    index = {"weight_map": {"model.norm.weight": place}}
    (qwen3 / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="expected weights in safetensors files, found no "):
        load_model(qwen3)


def test_a_tensor_that_is_not_in_the_file_that_the_index_names_is_named(qwen3: Path) -> None:
    split_checkpoint(qwen3)
    tensors = load_file(qwen3 / "model-00001-of-00002.safetensors")
    name = sorted(tensors)[1]
    save_file({key: x for key, x in tensors.items() if key != name}, qwen3 / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=rf"00001-of-00002\.safetensors: expected the tensor {re.escape(name)},"):
        load_model(qwen3)


def test_two_tensors_of_one_meaning_are_refused(tmp_path: Path) -> None:
    """The Hub's name and transformers' own of the same weights."""
    shutil.copytree(model_folder("deepseek_v4"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    change_tensors(tmp_path, {"embed_tokens.weight": -tensors["embed.weight"]})
    with pytest.raises(CheckpointError, match=r"expected one tensor of embed\S*\.weight and embed\S*\.weight, which"):
        load_model(tmp_path)


def test_an_adapter_beside_the_weights_is_not_ignored(qwen3: Path) -> None:
    (qwen3 / "adapter_config.json").write_text("{}")
    with pytest.raises(NotImplementedError, match=r"expected weights without an adapter, got adapter_config\.json"):
        load_model(qwen3)


def test_a_tied_model_has_no_other_head(qwen3: Path) -> None:
    """Stacks differ in which of the two they use."""
    embeddings = load_file(qwen3 / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(qwen3, {"lm_head.weight": embeddings + 1})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: expected the embeddings, since tie_word"):
        load_model(qwen3)


def test_what_is_saved_loads_as_the_same_weights(qwen3: Path) -> None:
    before = load_file(qwen3 / "model.safetensors")
    save_weights(load_model(qwen3).module, qwen3)
    chex.assert_trees_all_equal(load_file(qwen3 / "model.safetensors"), before, strict=True)


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "float16"])
def test_weights_are_in_the_dtype_that_is_asked_for_or_the_checkpoints_own(qwen3: Path, dtype: str | None) -> None:
    """The config that comes back says which; the planned cache is in that dtype too."""
    config = json.loads((qwen3 / "config.json").read_text())
    (qwen3 / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    model = load_model(qwen3, dtype)
    wanted = dtype or "bfloat16"
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(nnx.state(model.module))} == {wanted}
    assert model.config.dtype == wanted
    assert {spec.dtype for spec in model.config.kv_cache_specs().values()} == {wanted}


def test_weights_of_another_dtype_are_refused(qwen3: Path) -> None:
    with pytest.raises(ValueError, match="expected a dtype of weights out of float32, bfloat16, float16, got 'int8'"):
        load_model(qwen3, "int8")


def test_missing_misshapen_and_surplus_tensors_are_named_with_their_shapes(qwen3: Path) -> None:
    change_tensors(
        qwen3,
        {
            "model.layers.1.mlp.up_proj.weight": None,
            "model.layers.0.self_attn.k_proj.weight": np.zeros((64, 32), np.float32),
            "model.layers.0.self_attn.k_proj.bias": np.zeros(32, np.float32),
        },
    )
    with pytest.raises(CheckpointError) as raised:
        load_model(qwen3)
    text = str(raised.value)
    assert "model.layers.1.mlp.up_proj.weight: expected shape (96, 64), got no such tensor" in text
    assert "model.layers.0.self_attn.k_proj.weight: expected shape (32, 64), got (64, 32)" in text
    assert "model.layers.0.self_attn.k_proj.bias: expected no such tensor" in text
    assert text.count("\n") == 3


def test_a_long_list_of_problems_is_cut(qwen3: Path) -> None:
    config = json.loads((qwen3 / "config.json").read_text())
    config |= {"num_hidden_layers": 8, "layer_types": ["full_attention"] * 8}
    (qwen3 / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"and 35 more$"):
        load_model(qwen3)


def test_a_tied_head_and_other_modalities_are_no_surplus(qwen3: Path) -> None:
    plain = last_logits(qwen3)
    tensors = load_file(qwen3 / "model.safetensors")
    changes: dict[str, np.ndarray | None] = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    changes |= dict.fromkeys(tensors)
    changes |= {
        "language_model.lm_head.weight": tensors["model.embed_tokens.weight"],
        "vision_tower.patch.weight": np.zeros(3, np.float32),
        "language_model.model.rotary_emb.inv_freq": np.zeros(8, np.float32),
    }
    change_tensors(qwen3, changes)
    np.testing.assert_array_equal(last_logits(qwen3), plain)


@pytest.mark.parametrize(
    ("prefix", "head"), [("language_model.model.", "language_model."), ("model.language_model.", ""), ("", "")]
)
def test_an_output_head_stands_beside_the_layers_of_any_prefix(tmp_path: Path, prefix: str, head: str) -> None:
    shutil.copytree(model_folder("llama"), tmp_path, dirs_exist_ok=True)
    plain = load_model(model_folder("llama")).module.lm_head.kernel[...]
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {prefix + name.removeprefix("model."): x for name, x in tensors.items() if name != "lm_head.weight"}
    save_file({**renamed, f"{head}lm_head.weight": tensors["lm_head.weight"]}, tmp_path / "model.safetensors")
    chex.assert_trees_all_equal(load_model(tmp_path).module.lm_head.kernel[...], plain)


def test_a_folder_without_weights_or_with_a_broken_file_is_refused(qwen3: Path) -> None:
    (qwen3 / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(CheckpointError, match="expected a safetensors file, got one that cannot be read"):
        load_model(qwen3)
    (qwen3 / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"found no .*model\.safetensors"):
        load_model(qwen3)


def test_a_missing_package_names_its_extra() -> None:
    with pytest.raises(MissingExtraError, match=r"loading a model needs no_such_package.*pip install 'kvjax\[hf\]'"):
        require_extra("no_such_package.numpy", "hf", "loading a model")


def write_tokenizer(folder: Path) -> None:
    """One token per byte, and a beginning-of-text token that the post-processor puts first."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = FastTokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.add_special_tokens(["<bos>"])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 256)])
    backend.save(str(folder / "tokenizer.json"))


def test_text_survives_the_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer is not None
    ids = tokenizer.encode("naïve “text”")
    assert ids[0] == 256
    assert len(ids) == 1 + len("naïve “text”".encode())
    assert tokenizer.decode(ids) == "naïve “text”"
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith("<bos>")
    assert tokenizer.decode(np.asarray(ids[:4])) == "na\ufffd"
    assert tokenizer.vocab_size == 257


def test_a_model_has_the_tokenizer_of_its_folder_if_any(qwen3: Path) -> None:
    assert load_model(qwen3).tokenizer is None
    write_tokenizer(qwen3)
    tokenizer = load_model(qwen3).tokenizer
    assert tokenizer is not None
    (qwen3 / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: expected a tokenizer"):
        Tokenizer.from_folder(qwen3)


@pytest.mark.parametrize("name", ["tokenizer.model", "tiktoken.model", "spiece.model", "vocab.json"])
def test_text_for_a_tokenizer_of_another_form_is_refused_with_the_way_to_convert_it(qwen3: Path, name: str) -> None:
    (qwen3 / name).write_bytes(b"")
    model = load_model(qwen3)
    assert model.tokenizer is None
    assert model.no_tokenizer == (
        f"the model has no tokenizer, since its folder has {name} and no tokenizer.json; transformers (with "
        "sentencepiece, tiktoken) makes one: "
        f"transformers.AutoTokenizer.from_pretrained({str(qwen3)!r}).save_pretrained({str(qwen3)!r})"
    )
    engine = LLMEngine(model, EngineConfig(num_blocks=40, max_model_len=32, max_buckets=1))
    with pytest.raises(
        ValueError, match=f"expected token ids, got text: the model .* has {name} and no tokenizer.json"
    ):
        engine.add_request("text")
    with pytest.raises(ValueError, match=r"stop strings, got one without: .*\.AutoTokenizer"):
        engine.add_request([1], SamplingParams(stop="a"))


MESH_PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh
from kvjax.models import DenseAttention, load_model
from tests.models.golden_models import goldens_of, model_folder

mesh = Mesh(np.asarray(jax.devices()), ("tensor",))
for name in ("llama", "qwen3"):
    module = load_model(model_folder(name), mesh=mesh).module
    block = module.layers[0]
    shard = block.mlp.down_proj.kernel[...].addressable_shards[0].data.shape
    assert shard == (24, 64), shard
    kv_shard = block.self_attn.k_proj.kernel[...].addressable_shards[0].data.shape
    assert kv_shard == ((64, 32) if name == "qwen3" else (64, 16)), kv_shard
    forward = jax.jit(lambda tokens: module.logits(module(tokens, jnp.arange(tokens.size), DenseAttention())))
    golden = goldens_of(name)[0]
    logits = np.asarray(forward(jnp.asarray(golden.prompt)))[golden.positions]
    np.testing.assert_allclose(logits, golden.logits, atol=1e-4, rtol=0)
try:
    load_model(model_folder("llama"), mesh=Mesh(np.asarray(jax.devices()[:3]), ("tensor",)))
except ValueError as error:
    assert "expected query heads to divide over 3 devices, got 8" in str(error)
else:
    raise SystemExit("three devices were not refused")
whole = load_model(model_folder("llama"), mesh=Mesh(np.asarray(jax.devices()), ("data",))).module
assert whole.layers[0].mlp.down_proj.kernel[...].sharding.is_fully_replicated
"""


def test_a_model_split_over_four_devices_gives_the_same_logits() -> None:
    """In a process of its own, since the number of CPU devices is set before jax starts."""
    program = "import jax\njax.config.update('jax_num_cpu_devices', 4)\n" + MESH_PROGRAM
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_model_is_made_for_the_length_that_it_is_run_for() -> None:
    """Long rope: short factors up to the length of pretraining, as transformers has them there."""
    folder = model_folder("phi3_longrope")
    whole, short = (load_model(folder, "float32", max_model_len=length).module for length in (None, 32))
    assert (whole.config.max_model_len, short.config.max_model_len) == (
        ModelConfig.from_folder(folder).max_model_len,
        32,
    )
    rope = short.config.rope
    assert rope is not None
    assert rope.original_max_len == 32
    short_frequencies = inverse_frequencies(rope, short.config.head_dim, 32)
    assert not np.allclose(short_frequencies, inverse_frequencies(rope, short.config.head_dim, 33))
    tokens = jnp.asarray(goldens_of("phi3_longrope")[0].prompt[:20])

    def forward(module: LanguageModel) -> jax.Array:
        return module.logits(module(tokens, jnp.arange(20), DenseAttention()))

    assert not np.allclose(forward(whole), forward(short), atol=1e-2)


@pytest.mark.parametrize(("name", "pretrained", "longest"), [("llama_yarn", 64, 512), ("llama_linear", 128, 512)])
def test_a_config_may_give_the_length_of_pretraining(tmp_path: Path, name: str, pretrained: int, longest: int) -> None:
    """The scaling's factor makes the longest length of it, and nothing else is computed."""
    shutil.copytree(model_folder(name), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": pretrained}))
    model = load_model(tmp_path, "float32")
    assert model.config.max_model_len == longest
    golden = goldens_of(name)[2]
    assert len(golden.prompt) > 64
    hidden = model.module(jnp.asarray(golden.prompt), jnp.arange(len(golden.prompt)), DenseAttention())
    np.testing.assert_allclose(model.module.logits(hidden)[golden.positions], golden.logits, atol=1e-4, rtol=0)


def test_a_table_of_positions_stays_whole_for_a_shorter_run() -> None:
    config = load_model(model_folder("whisper"), "float32", max_model_len=100).config
    assert config == replace(ModelConfig.from_folder(model_folder("whisper")), dtype="float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_no_number_is_named(qwen3: Path, bad: float, dtype: str) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = load_file(qwen3 / "model.safetensors")[name].copy()
    tensor[3, 5] = tensor[40, 0] = bad
    change_tensors(qwen3, {name: tensor})
    with pytest.raises(CheckpointError, match=rf"expected finite numbers in {name}, got 2 of 6144 .* in {dtype}"):
        load_model(qwen3, dtype)
    kernel = load_model(qwen3, dtype, check_finite=False).module.layers[1].mlp.up_proj.kernel[...]
    np.testing.assert_array_equal(np.argwhere(~np.isfinite(kernel)), [[0, 40], [5, 3]])


def test_a_weight_that_overflows_in_the_dtype_that_is_asked_for_is_named(qwen3: Path) -> None:
    name = "model.norm.weight"
    change_tensors(qwen3, {name: load_file(qwen3 / "model.safetensors")[name] * 0 + 1e5})
    assert np.isfinite(load_model(qwen3, "bfloat16").module.norm.scale[...]).all()
    with pytest.raises(CheckpointError, match=rf"expected finite numbers in {name}, got 64 of 64 .* in float16"):
        load_model(qwen3, "float16")


def copy_with_config(name: str, folder: Path, **changes: Any) -> None:
    """A golden model's folder, its config.json changed."""
    shutil.copytree(model_folder(name), folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("name", "head", "embeddings"),
    [
        ("llama", "lm_head.weight", "model.embed_tokens.weight"),
        ("mixtral", "lm_head.weight", "model.embed_tokens.weight"),
        ("jamba", "lm_head.weight", "model.embed_tokens.weight"),
        ("qwen3_next", "lm_head.weight", "model.embed_tokens.weight"),
        ("deepseek_v4", "head.weight", "embed.weight"),
        ("whisper", "proj_out.weight", "model.decoder.embed_tokens.weight"),
    ],
)
def test_a_tied_head_is_the_embeddings_or_refused(tmp_path: Path, name: str, head: str, embeddings: str) -> None:
    """transformers uses a head of other values in spite of the config, and warns."""
    copy_with_config(name, tmp_path, tie_word_embeddings=True)
    tensors = load_file(model_folder(name) / "model.safetensors")
    for factor in (None, 1.0):
        change_tensors(tmp_path, {head: None if factor is None else tensors[embeddings] * factor})
        assert not hasattr(load_model(tmp_path).module, "lm_head")
    change_tensors(tmp_path, {head: tensors[embeddings] * 2})
    with pytest.raises(CheckpointError, match=rf"{head}: expected the embeddings, .* got other values: change the"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["nemotron_h", "kimi_linear"])
def test_a_head_that_transformers_never_ties_is_used_whatever_the_config_says(tmp_path: Path, name: str) -> None:
    copy_with_config(name, tmp_path, tie_word_embeddings=True)
    untied = load_model(model_folder(name)).module.lm_head.kernel[...]
    chex.assert_trees_all_equal(load_model(tmp_path).module.lm_head.kernel[...], untied)
    change_tensors(tmp_path, {"lm_head.weight": None})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: expected shape \(256, 32\), got no such tensor"):
        load_model(tmp_path)


def test_an_engine_rotates_for_its_own_length_whatever_the_model_was_loaded_for() -> None:
    """Long rope: short factors where no request is longer than pretraining's text."""
    model = load_model(model_folder("phi3_longrope"), "float32")
    limits = {"num_blocks": 40, "block_size": 4, "max_num_batched_tokens": 64, "max_buckets": 1}
    prompt, params = goldens_of("phi3_longrope")[0].prompt[:20], SamplingParams(max_tokens=1, temperature=0.0)

    def logprob(model: Any, max_model_len: int) -> float:
        engine = LLMEngine(model, EngineConfig(max_model_len=max_model_len, **limits))
        return engine.generate([prompt], params)[0].logprobs[0]

    short = load_model(model_folder("phi3_longrope"), "float32", max_model_len=32)
    assert logprob(model, 32) == logprob(short, 32) == logprob(short, 24) != logprob(model, 33)
    assert model.for_length(32) is model.for_length(24) is not model
    assert model.for_length(33) is model
    weights = (one.module.embed_tokens.embedding[...] for one in (model, model.for_length(32)))
    assert next(weights) is next(weights)


@pytest.mark.parametrize("length", [1, 100, 128])
def test_dynamic_rope_is_plain_within_the_length_of_pretraining(length: int) -> None:
    """As transformers computes it, which stretches beyond `max_position_embeddings` only."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    config: Any = ModelConfig.from_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "max_position_embeddings": 128,
            "rope_parameters": rope,
        }
    )
    assert config.max_model_len == 512
    exponents = np.arange(0, 16, 2) / 16
    np.testing.assert_allclose(inverse_frequencies(config.rope, 16, length), 10_000.0**-exponents, rtol=1e-6)
    for longer in (129, 300, 512):
        theta = 10_000.0 * (4.0 * longer / 128 - 3.0) ** (16 / 14)
        np.testing.assert_allclose(inverse_frequencies(config.rope, 16, longer), theta**-exponents, rtol=1e-6)

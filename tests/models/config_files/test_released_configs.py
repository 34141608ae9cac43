"""Released models' configs are read, and no key of theirs is ignored that transformers or another stack goes by."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvjax.errors import CheckpointError, ConfigError
from kvjax.models import ModelConfig, load_model
from scripts.goldens.small_configs import ARCHITECTURES, small_config
from tests.models.config_files.released_configs import COMPUTED_OTHERWISE, RELEASED, SAID_ANYWAY
from tests.models.golden_models import model_folder

OTHERWISE = [(architecture, key) for architecture, keys in COMPUTED_OTHERWISE.items() for key in keys]


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_config_is_read(name: str) -> None:
    data, expected = RELEASED[name]
    config: Any = ModelConfig.from_dict(data)
    assert (config.num_layers, config.max_model_len, config.tie_word_embeddings, config.cache_words) == expected
    assert config.dtype == "bfloat16"


@pytest.mark.parametrize("architecture", SAID_ANYWAY)
def test_keys_that_say_what_is_computed_anyway_change_nothing(architecture: str) -> None:
    data = small_config(architecture)
    assert ModelConfig.from_dict(data | SAID_ANYWAY[architecture]) == ModelConfig.from_dict(data)


@pytest.mark.parametrize(("architecture", "key"), OTHERWISE)
def test_keys_that_ask_for_another_computation_are_refused(architecture: str, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        ModelConfig.from_dict(small_config(architecture) | {key: COMPUTED_OTHERWISE[architecture][key]})


@pytest.mark.parametrize("is_outside", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_quantisation_is_known_of_every_architecture(architecture: str, is_outside: bool) -> None:
    """What weights are quantised by can be planned for."""
    data = small_config(architecture)
    part = data if is_outside else data.get("text_config", data)
    part["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert ModelConfig.from_dict(data).quant_method == "fp8"
    part["quantization_config"] = {"bits": 4}
    assert ModelConfig.from_dict(data).quant_method == "an unnamed method"
    part["quantization_config"] = None
    assert ModelConfig.from_dict(data).quant_method is None


@pytest.mark.parametrize("name", ["llama", "gemma4", "deepseek_v3", "jamba"])
def test_checkpoints_quantised_by_what_is_not_read_are_refused(tmp_path: Path, name: str) -> None:
    shutil.copytree(model_folder(name), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "hqq"}}))
    with pytest.raises(NotImplementedError, match=r"expected weights as they are, .*, got weights quantised by hqq"):
        load_model(tmp_path)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16])
def test_weights_of_few_bits_are_not_loaded_whatever_the_config_says(tmp_path: Path, dtype: Any) -> None:
    shutil.copytree(model_folder("llama"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    save_file(tensors | {name: tensors[name].astype(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.self_attn\.k_proj\.weight: expected one of F64, .*, got [IU]"
    ):
        load_model(tmp_path)

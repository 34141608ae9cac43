"""What is not read is refused by its name; a config that does not say how weights are quantised is asked for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvjax.errors import CheckpointError, ConfigError
from kvjax.models import load_model
from tests.models.golden_models import model_folder
from tests.models.quantised.checkpoints import write_quantised

UNREAD = ("bitsandbytes", "hqq", "quanto", "torchao", "fbgemm_fp8", "exl2", "gguf", "modelopt", "quark", "aqlm", "eetq")


@pytest.mark.parametrize("method", UNREAD)
def test_what_is_not_read_is_refused_by_its_name_with_what_to_do(tmp_path: Path, method: str) -> None:
    folder = write_quantised(tmp_path, {"quant_method": method}, {})
    with pytest.raises(NotImplementedError, match=rf"quantised by awq, .*, got weights quantised by {method}: take a"):
        load_model(folder)


def test_a_folder_of_gguf_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "model-q4_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        ConfigError, match=r"found no .*config\.json; model-q4_0\.gguf has weights quantised by GGUF, which"
    ):
        load_model(tmp_path)


def test_a_method_without_a_name_is_refused(tmp_path: Path) -> None:
    folder = write_quantised(tmp_path, {"load_in_4bit": True}, {})
    with pytest.raises(NotImplementedError, match="got weights quantised by an unnamed method: take a release"):
        load_model(folder)


@pytest.mark.parametrize("name", ["gemma4", "deepseek_v3", "qwen3_vl"])
@pytest.mark.parametrize("is_inside", [False, True])
def test_the_text_config_or_the_outer_one_says_how(tmp_path: Path, name: str, is_inside: bool) -> None:
    shutil.copytree(model_folder(name), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    part: dict[str, Any] = config.get("text_config", config) if is_inside else config
    part["quantization_config"] = {"quant_method": "hqq"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotImplementedError, match="got weights quantised by hqq"):
        load_model(tmp_path)


def test_a_quantization_config_that_is_no_object_is_refused(tmp_path: Path) -> None:
    folder = write_quantised(tmp_path, {"quant_method": "fp8"}, {})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": "fp8"}))
    with pytest.raises(ConfigError, match="expected 'quantization_config' to be an object, got 'fp8'"):
        load_model(folder)


@pytest.mark.parametrize("end", [".weight_scale_inv", ".weight_scale", ".scale"])
def test_scales_without_a_word_in_the_config_are_not_ignored(tmp_path: Path, end: str) -> None:
    folder = write_quantised(tmp_path, {}, {".weight": np.ones((96, 64), np.float32), end: np.ones(1, np.float32)})
    with pytest.raises(
        CheckpointError, match=r"expected a quantization_config in config.json, got none beside 1 weights"
    ):
        load_model(folder)


def test_a_quantised_checkpoint_of_plain_weights_is_the_same_model(tmp_path: Path) -> None:
    """All that a config excepts may be all there is."""
    weight = np.ones((96, 64), np.float32)
    folder = write_quantised(tmp_path, {"quant_method": "fp8", "modules_to_not_convert": ["mlp"]}, {".weight": weight})
    np.testing.assert_array_equal(load_model(folder).module.layers[1].mlp.up_proj.kernel[...], weight.T)

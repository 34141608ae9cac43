"""Quantised checkpoints of a tiny model, written tensor by tensor, for tests of one scheme."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from kvjax.models import load_model
from tests.models.golden_models import model_folder

Arrays = dict[str, np.ndarray]
PROJECTION = "model.layers.1.mlp.up_proj"  # float32[96, 64] of the tiny Llama
EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"  # float32[8, 32, 64] of the tiny GPT-OSS


def write_quantised(folder: Path, quantization: dict[str, Any], parts: Arrays) -> Path:
    """The tiny Llama with one projection quantised; `parts` by the rest of their names behind `PROJECTION`."""
    return _written(
        folder, "llama", quantization, f"{PROJECTION}.weight", {PROJECTION + end: x for end, x in parts.items()}
    )


def write_quantised_experts(folder: Path, quantization: dict[str, Any], parts: Arrays) -> Path:
    """The tiny GPT-OSS with one projection of its experts quantised; `parts` as above, behind `EXPERTS`."""
    return _written(folder, "gpt_oss", quantization, EXPERTS, {EXPERTS + end: x for end, x in parts.items()})


def _written(folder: Path, model: str, quantization: dict[str, Any], replaced: str, parts: Arrays) -> Path:
    shutil.copytree(model_folder(model), folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    tensors = load_file(folder / "model.safetensors")
    del tensors[replaced]
    tensors |= {name: np.array(part, order="C") for name, part in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def loaded_projection(folder: Path, dtype: str = "float32") -> np.ndarray:  # [96, 64]
    """The projection as it is loaded."""
    module: Any = load_model(folder, dtype).module
    return np.asarray(module.layers[1].mlp.up_proj.kernel[...]).T

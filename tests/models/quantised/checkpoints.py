"""Quantised checkpoints of a tiny model, written tensor by tensor, for tests of one scheme."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.models.golden_models import model_folder

Arrays = dict[str, np.ndarray]
PROJECTION = "model.layers.1.mlp.up_proj"  # float32[96, 64] of the tiny Llama


def write_quantised(
    folder: Path,
    quantization: dict[str, Any],
    parts: Arrays,  # by the rest of the name behind `PROJECTION`; in place of its weight
) -> Path:
    """The tiny Llama with one projection quantised."""
    shutil.copytree(model_folder("llama"), folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{PROJECTION}.weight"]
    save_file(
        tensors | {PROJECTION + end: np.array(x, order="C") for end, x in parts.items()}, folder / "model.safetensors"
    )
    return folder


def projection_of(load: Callable[..., Any], folder: Path, dtype: str = "float32") -> np.ndarray:  # [96, 64]
    """The projection as it is loaded."""
    return np.asarray(load(folder, dtype).module.layers[1].mlp.up_proj.kernel[...]).T

"""Writes a decoder's weights as a Hugging Face checkpoint.

Flow:    LanguageModel -> [save_weights] -> model.safetensors
"""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.extras import require_extra
from kvjax.models.layers.language_model import LanguageModel
from kvjax.models.tensor_sources import tensor_source


def save_weights(module: LanguageModel, folder: str | Path, dtype: str = "bfloat16") -> Path:
    """Writes `folder`/model.safetensors in `dtype`, tables of integers as they are; the path of the file.

    Raises:
        MissingExtraError: safetensors is not installed.
        NotImplementedError: the checkpoint's tensors hold several parameters each, or weights are kept quantised.
    """
    safetensors_numpy = require_extra("safetensors.numpy", "hf", "saving a checkpoint")
    tensors = {}
    for path, param in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        if path[-1] == "kernel_scale":
            raise NotImplementedError(
                f"expected weights of one dtype, got {'.'.join(map(str, path[:-1]))} kept quantised: load the model "
                "without keep_quantised to save it"
            )
        source = tensor_source(module, path, module.tensor_prefixes[0])
        values = param[...]
        is_float = jnp.issubdtype(values.dtype, jnp.floating)
        array = np.asarray(values.astype(jnp.dtype(dtype)) if is_float else values)
        for name, part in zip(source.names, source.split(array), strict=True):
            tensors[name] = np.ascontiguousarray(part)
    file = Path(folder) / "model.safetensors"
    safetensors_numpy.save_file(tensors, file, metadata={"format": "pt"})
    return file

"""Loads a Hugging Face folder: config.json, safetensors in one file or several, tokenizer.json.

Flow:    folder -> [load_model] -> LoadedModel(config, module, tokenizer)

Nothing is loaded before every tensor's name and shape has been checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from kvjax.device.placement import TENSOR_AXIS
from kvjax.errors import CheckpointError
from kvjax.extras import require_extra
from kvjax.models.checkpoint_names import TensorName, tensor_name
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.models.sharding import check_mesh, param_sharding
from kvjax.models.tokenizer import Tokenizer

ParamPath = tuple[Any, ...]  # such as ("layers", 0, "self_attn", "q_proj", "kernel")

# Prefixes that stand before the decoder's tensors; which one a checkpoint has depends on the version that wrote it.
_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")
# Tensors of a multimodal checkpoint that a text decoder has no use for.
_OTHER_MODALITIES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


@dataclass(frozen=True)
class LoadedModel:
    """A decoder ready to run; `tokenizer` is None where the folder has no tokenizer.json."""

    config: ModelConfig
    module: Decoder
    tokenizer: Tokenizer | None


def load_model(
    folder: str | Path,
    dtype: str = "float32",
    mesh: Mesh | None = None,
    *,
    tensor_axis: str = TENSOR_AXIS,
) -> LoadedModel:
    """The model in `folder` with weights in `dtype`, split over the axis `tensor_axis` of `mesh` if there is one.

    Raises:
        ConfigError: as `ModelConfig.from_folder`.
        CheckpointError: no weights, or tensors that are missing, surplus or misshapen; all of them are named.
        MissingExtraError: safetensors or tokenizers is not installed.
        NotImplementedError: the architecture can only be planned for.
        ValueError: heads or feed-forward columns do not divide over the axis.
    """
    folder = Path(folder)
    config = ModelConfig.from_folder(folder)
    if mesh is not None:
        check_mesh(config, mesh, tensor_axis)
    abstract = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    params = nnx.to_flat_state(state)
    with ExitStack() as stack:
        tensors = _open_tensors(folder, stack)
        names = _match_names([(path, param.shape) for path, param in params], tensors, config, folder)
        loaded = []
        for path, param in params:
            target = names[path]
            array = tensors[target.name].get_tensor(target.name)
            array = np.asarray(array.T if target.transposed else array, jnp.dtype(dtype))
            where = None if mesh is None else param_sharding(path, config, mesh, tensor_axis)
            loaded.append((path, param.replace(jax.device_put(array, where, may_alias=False))))
    module = nnx.merge(graph, nnx.from_flat_state(loaded))
    return LoadedModel(config, module, Tokenizer.from_folder(folder))


def _weight_files(folder: Path) -> list[Path]:
    """The checkpoint's files: those of the index if there is one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index}: expected a JSON object with a weight_map, got {error!r}") from error
        files = [folder / name for name in names]
    else:
        files = [folder / "model.safetensors"]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"expected weights in safetensors files, found no {file}")
    return files


def _open_tensors(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """The open file of every tensor, by the tensor's name; `stack` closes them."""
    safetensors = require_extra("safetensors", "hf", "loading a model")
    tensors: dict[str, Any] = {}
    for file in _weight_files(folder):
        try:
            opened = stack.enter_context(safetensors.safe_open(file, framework="numpy"))
        except safetensors.SafetensorError as error:
            raise CheckpointError(
                f"{file}: expected a safetensors file, got one that cannot be read: {error}"
            ) from error
        tensors |= dict.fromkeys(opened.keys(), opened)
    return tensors


def _match_names(
    params: list[tuple[ParamPath, tuple[int, ...]]],  # path and shape of every parameter
    tensors: dict[str, Any],
    config: ModelConfig,
    folder: Path,
) -> dict[ParamPath, TensorName]:
    """The tensor of every parameter.

    Raises:
        CheckpointError: with one line per tensor that is missing, misshapen or surplus.
    """
    prefix = next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in tensors), _PREFIXES[0])
    names = {path: tensor_name(path, prefix) for path, _ in params}
    problems = []
    for path, shape in params:
        target = names[path]
        expected = shape[::-1] if target.transposed else shape
        if target.name not in tensors:
            problems.append(f"{target.name}: expected shape {tuple(expected)}, got no such tensor")
            continue
        got = tuple(tensors[target.name].get_slice(target.name).get_shape())
        if got != tuple(expected):
            problems.append(f"{target.name}: expected shape {tuple(expected)}, got {got}")
    known = {target.name for target in names.values()}
    problems += [f"{name}: expected no such tensor" for name in _surplus(tensors, known, config)]
    if problems:
        shown = problems[:20] + ([f"and {len(problems) - 20} more"] if len(problems) > 20 else [])
        raise CheckpointError(f"{folder}: the checkpoint does not fit its config.json:\n  " + "\n  ".join(shown))
    return names


def _surplus(tensors: dict[str, Any], known: set[str], config: ModelConfig) -> Iterator[str]:
    """Names that the decoder has no place for, in order; a tied head's copy and rotary tables are not among them."""
    for name in sorted(set(tensors) - known):
        is_tied_head = config.tie_word_embeddings and name.endswith("lm_head.weight")
        if not is_tied_head and not name.endswith("rotary_emb.inv_freq") and not name.startswith(_OTHER_MODALITIES):
            yield name

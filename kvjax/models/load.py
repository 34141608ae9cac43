"""Loads a Hugging Face folder: config.json, safetensors in one file or several, tokenizer.json.

Flow:    folder -> [load_model] -> LoadedModel(config, module, tokenizer)

Nothing is loaded before every tensor's name and shape has been checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from kvjax.device.mesh.placement import TENSOR_AXIS, with_auto_axes
from kvjax.errors import CheckpointError
from kvjax.models.chat import ChatTemplate
from kvjax.models.config import ModelConfig, StreamingWindow, read_json_object
from kvjax.models.configs.keys import WEIGHT_DTYPES
from kvjax.models.configs.rope import RopeConfig
from kvjax.models.finite import num_not_finite
from kvjax.models.layers.language_model import LanguageModel
from kvjax.models.quantised import Scheme, dequantised, scheme_of
from kvjax.models.quantised.kept import keep_projections
from kvjax.models.registry import build_model
from kvjax.models.sharding import param_sharding
from kvjax.models.tensor_files import CheckpointTensor, open_tensors
from kvjax.models.tensor_sources import ParamPath, TensorSource, tensor_source
from kvjax.models.tokenizer import NO_TOKENIZER, Tokenizer, why_no_tokenizer

_SCALE = r"\.(weight_scale_inv|weight_scale|scale)$"  # ends of names of tensors that stand beside quantised weights


@dataclass(frozen=True)
class LoadedModel:
    """A decoder ready to run, its weights in `config.dtype`; `tokenizer` is None where the folder has none."""

    config: ModelConfig
    module: LanguageModel
    tokenizer: Tokenizer | None
    no_tokenizer: str = NO_TOKENIZER  # what to tell who needs one, where there is none
    chat_template: ChatTemplate | None = None  # None: the folder has none
    _others: dict[tuple[RopeConfig, ...], LoadedModel] = field(default_factory=dict, repr=False, compare=False)

    def for_length(self, max_model_len: int) -> LoadedModel:
        """The model as it is for sequences of at most `max_model_len` tokens: itself where no rotary embedding changes.

        Lengths that choose the same frequencies give the same object, over the same arrays.
        """
        shorter = self.config.for_length(min(max_model_len, self.config.max_model_len))
        if shorter.rotation == self.config.rotation:
            return self
        if shorter.rotation not in self._others:
            module = self.module.for_length(max_model_len)
            self._others[shorter.rotation] = replace(self, config=module.config, module=module, _others={})
        return self._others[shorter.rotation]


def load_model(
    folder: str | Path,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    *,
    tensor_axis: str = TENSOR_AXIS,
    max_model_len: int | None = None,
    streaming: StreamingWindow | None = None,
    check_finite: bool = True,
    keep_quantised: bool = False,
) -> LoadedModel:
    """The model in `folder`, split over the axis `tensor_axis` of `mesh` if there is one.

    Weights are in `dtype`, None: in that of the folder's config.json; the config that comes back says which. Quantised
    weights are made that on the way, one tensor at a time; `kvjax.models.quantised` has the ways that are read. With
    `keep_quantised` projections in float8, or in int8 without zero points, stay as they are stored.
    With `max_model_len` it is made for sequences of that many tokens at most, which long and dynamic rope go by; an
    engine sees to that by itself. With `streaming` its layers, which have full attention, see a window and the first
    tokens only. `check_finite` reads every weight once more while it is in memory, about 1 s for 4 GB.

    Raises:
        ConfigError: as `ModelConfig.from_folder`.
        CheckpointError: no weights, or tensors that are missing, surplus or misshapen; all of them are named. With
            `check_finite`, a weight that is NaN or infinite in the dtype that it is loaded in; its tensor is named.
        MissingExtraError: safetensors or tokenizers is not installed.
        NotImplementedError: weights are quantised by something that is not read, or have an adapter beside them.
        ValueError: weights have no such dtype here, heads or feed-forward columns do not divide over the axis, or
            layers other than of full attention are to stream; nothing is quantised so that it could be kept.
    """
    if dtype is not None and dtype not in WEIGHT_DTYPES:
        raise ValueError(f"expected a dtype of weights out of {', '.join(WEIGHT_DTYPES)}, got {dtype!r}")
    folder = Path(folder)
    config = ModelConfig.from_folder(folder)
    _check_form(folder)
    scheme = scheme_of(read_json_object(folder / "config.json"), str(folder / "config.json"))
    if max_model_len is not None and max_model_len < config.max_model_len:
        config = config.for_length(max_model_len)
    config = config if streaming is None else config.for_streaming(streaming)
    config = config if dtype is None else replace(config, dtype=dtype)
    if mesh is not None:
        mesh = with_auto_axes(mesh)
        config.check_split(mesh.shape.get(tensor_axis, 1))
    abstract = nnx.eval_shape(lambda: build_model(config, dtype=config.dtype, rngs=nnx.Rngs(0)))
    params = nnx.to_flat_state(nnx.state(abstract))
    with ExitStack() as stack:
        tensors = _open_weights(folder, config, abstract, scheme, stack)
        sources = _match_tensors([(path, param.shape) for path, param in params], tensors, abstract, folder)
        if keep_quantised:
            sources, tensors = keep_projections(abstract, sources, tensors)
        graph, state = nnx.split(abstract)
        # Parameters that are parts of one tensor come close together.
        read = lru_cache(maxsize=2)(lambda name: tensors[name].read())
        loaded = []
        for path, param in nnx.to_flat_state(state):
            source = sources[path]
            parts = [read(name) for name in source.names]
            with np.errstate(over="ignore" if check_finite else "warn"):
                array = np.asarray(source.join(parts, param.shape), param.dtype)
            if check_finite:
                _check_finite(array, source, folder)
            where = None if mesh is None else param_sharding(abstract, path, mesh, tensor_axis)
            loaded.append((path, param.replace(jax.device_put(array, where, may_alias=False))))
    module = nnx.merge(graph, nnx.from_flat_state(loaded))
    return LoadedModel(
        config, module, Tokenizer.from_folder(folder), why_no_tokenizer(folder), ChatTemplate.from_folder(folder)
    )


def _check_finite(array: np.ndarray, source: TensorSource, folder: Path) -> None:
    """Raises CheckpointError where a parameter, as it is to be used, has a number that is none."""
    count = num_not_finite(array)
    if count:
        raise CheckpointError(
            f"{folder}: expected finite numbers in {', '.join(source.names[:3])}, got {count} of {array.size} that are "
            f"NaN or infinite in {array.dtype}: the file is damaged, or needs dtype='float32'; check_finite=False "
            "loads it as it is"
        )


def _check_form(folder: Path) -> None:
    """Raises NotImplementedError where weights are not all that the model has."""
    if (folder / "adapter_config.json").is_file():
        raise NotImplementedError(
            f"{folder}: expected weights without an adapter, got adapter_config.json, which transformers would apply: "
            "merge the adapter into the weights, or take it out of the folder"
        )


def _open_weights(
    folder: Path, config: ModelConfig, module: LanguageModel, scheme: Scheme | None, stack: ExitStack
) -> Mapping[str, CheckpointTensor]:
    """Every tensor by the name that the model has for it, quantised ones as what they stand for.

    Raises:
        CheckpointError: as `open_tensors`, or tensors are quantised and config.json does not say how.
    """
    tensors = open_tensors(folder, module.own_name, stack)
    if scheme is not None:
        return dequantised(scheme, tensors, jnp.dtype(config.dtype))
    scales = sorted(name for name in tensors if re.sub(_SCALE, ".weight", name) in tensors.keys() - {name})
    if scales:
        raise CheckpointError(
            f"{folder}: expected a quantization_config in config.json, got none beside {len(scales)} weights that are "
            f"quantised ({scales[0]}): take the config.json that was released with them"
        )
    return tensors


def _match_tensors(
    params: list[tuple[ParamPath, tuple[int, ...]]],  # path and shape of every parameter
    tensors: Mapping[str, CheckpointTensor],
    module: LanguageModel,
    folder: Path,
) -> dict[ParamPath, TensorSource]:
    """The source of every parameter.

    Raises:
        CheckpointError: with one line per tensor that is missing, misshapen or surplus.
    """
    prefixes = module.tensor_prefixes
    prefix = next((p for p in prefixes if p + module.anchor in tensors), prefixes[0])
    sources = {path: tensor_source(module, path, prefix).chosen(tensors, shape) for path, shape in params}
    problems = []
    for path, shape in params:
        for name, expected in zip(sources[path].names, sources[path].shapes(shape), strict=True):
            if name not in tensors:
                problems.append(f"{name}: expected shape {expected}, got no such tensor")
            elif (problem := tensors[name].problem) is not None:
                problems.append(f"{name}: {problem}")
            elif tensors[name].shape != expected:
                problems.append(f"{name}: expected shape {expected}, got {tensors[name].shape}")
    known = {name for source in sources.values() for name in source.names}
    problems += [f"{name}: expected no such tensor" for name in _surplus(tensors, known, module, prefix)]
    problems += _other_heads(tensors, module, prefix)
    if problems:
        shown = problems[:20] + ([f"and {len(problems) - 20} more"] if len(problems) > 20 else [])
        raise CheckpointError(f"{folder}: the checkpoint does not fit its config.json:\n  " + "\n  ".join(shown))
    return sources


def _surplus(
    tensors: Mapping[str, CheckpointTensor], known: set[str], module: LanguageModel, prefix: str
) -> Iterator[str]:
    """Names that the model has no place for, in order; a tied head's copy and rotary tables are not among them."""
    ignored = (*module.ignored_tensors, *(prefix + name for name in module.config.ignored_tensors))
    heads = set(_copies_of_head(tensors, module))
    for name in sorted(set(tensors) - known):
        is_ignored = name.endswith("rotary_emb.inv_freq") or name.startswith(ignored)
        if name not in heads and not is_ignored:
            yield name


def _copies_of_head(tensors: Mapping[str, CheckpointTensor], module: LanguageModel) -> list[str]:
    """Tensors that have the name of the output head, where the embeddings are that."""
    if not module.config.tie_word_embeddings:
        return []
    head = f"{module.tensor_names.get('lm_head', 'lm_head')}.weight"
    return [name for name in tensors if name == head or name.endswith(f".{head}")]


def _other_heads(tensors: Mapping[str, CheckpointTensor], module: LanguageModel, prefix: str) -> Iterator[str]:
    """What is wrong with copies of a tied head: one that is not the embeddings is an output head of its own."""
    embeddings = tensors.get(prefix + module.anchor)
    for name in _copies_of_head(tensors, module):
        if embeddings is not None and not np.array_equal(tensors[name].read(), embeddings.read()):
            yield (
                f"{name}: expected the embeddings, since tie_word_embeddings is true, got other values: change the "
                "config to use them, or remove them"
            )

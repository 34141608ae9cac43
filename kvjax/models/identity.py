"""What the K and V of a model depend on beside tokens and weights, as names and texts that can be compared and told.

Flow:    ModelConfig, module -> [model_identity] -> what a disk's units are of; tickets of transfers; set_weights

All that a config or a module holds counts, what a later version adds too, but for `WITHOUT_EFFECT`. Rotary embeddings
count as they are in use (`RopeConfig.for_length`). Of functions the name counts, and not what they compute.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from kvjax.device.model.model_weights import leaves_of
from kvjax.device.model.weights_digest import leaves_digest
from kvjax.models.config import ModelConfig
from kvjax.models.configs.rope import RopeConfig

# Fields of configs without effect on K and V. Of the longest length the rotary embedding is the effect.
WITHOUT_EFFECT = frozenset({"bos_token_id", "eos_token_ids", "max_model_len"})
MAX_TEXT = 80  # characters; longer texts are told by a hash


def model_identity(config: ModelConfig, module: Any) -> dict[str, str]:
    """Equal for models that make equal K and V of equal tokens, weights and pages.

    A name for each field of the config, such as "rope.theta", and "module" for class and attributes of what computes.
    """
    return {**dict(_config_texts(config)), "module": module_identity(module)}


def module_identity(module: Any) -> str:
    """Class and attributes of a module of Flax NNX, or of any pytree, but for its weights."""
    length = getattr(getattr(module, "config", None), "max_model_len", 0)
    return _short(_Description(length, leaves_of(module)).of(module), most=0)


def _config_texts(config: ModelConfig) -> Iterator[tuple[str, str]]:
    describe = _Description(config.max_model_len, [])
    yield "config", _name_of(type(config))
    for name, value in describe.items(config) if is_dataclass(config) else vars(config).items():
        if is_dataclass(value) and not isinstance(value, type):
            yield from ((f"{name}.{key}", _short(describe.of(one))) for key, one in describe.items(value))
        else:
            yield name, _short(describe.of(value))


class _Description:
    """A text of any value: equal texts for what computes the same, in every process."""

    def __init__(self, max_model_len: int, weights: list[Any]) -> None:
        self._max_model_len = max_model_len
        self._weights = {id(array) for array in weights}
        self._open: set[int] = set()  # objects that are being described

    def items(self, value: Any) -> Iterator[tuple[str, Any]]:
        """The fields of a dataclass that have an effect."""
        value = value.for_length(self._max_model_len) if isinstance(value, RopeConfig) else value
        skipped = WITHOUT_EFFECT if isinstance(value, ModelConfig) else frozenset()
        return ((one.name, getattr(value, one.name)) for one in fields(value) if one.name not in skipped)

    def of(self, value: Any) -> str:
        """The text."""
        if value is None or isinstance(value, bool | int | float | str | bytes | np.dtype | np.generic):
            return repr(value)
        if isinstance(value, nnx.Variable) or id(value) in self._weights:
            return "weights"
        if isinstance(value, np.ndarray | jax.Array):
            return leaves_digest([("", value)])
        if isinstance(value, functools.partial):
            return f"partial{self.of((value.func, value.args, value.keywords))}"
        if id(value) in self._open:
            return "above"
        self._open.add(id(value))
        parts = ", ".join(self._parts(value))
        self._open.discard(id(value))
        return f"{_name_of(value if callable(value) and hasattr(value, '__qualname__') else type(value))}({parts})"

    def _parts(self, value: Any) -> Iterator[str]:
        if isinstance(value, type) or type(value).__module__.partition(".")[0] in ("jax", "jaxlib"):
            return  # a device, a mesh: where it is computed
        if isinstance(value, Mapping):
            yield from sorted(f"{self.of(key)}: {self.of(one)}" for key, one in value.items())
        elif isinstance(value, Set):
            yield from sorted(map(self.of, value))
        elif isinstance(value, Sequence):
            yield from map(self.of, value)
        elif is_dataclass(value):
            yield from (f"{name}={self.of(one)}" for name, one in self.items(value))
        elif hasattr(value, "__dict__"):
            own = sorted((name, one) for name, one in vars(value).items() if not name.startswith("_pytree__"))
            yield from (f"{name}={self.of(one)}" for name, one in own)


def _name_of(value: Any) -> str:
    return str(value.__qualname__) if value.__module__ == "builtins" else f"{value.__module__}.{value.__qualname__}"


def _short(text: str, most: int = MAX_TEXT) -> str:
    """The text, or a hash of a long one."""
    return text if len(text) <= most else hashlib.sha256(text.encode()).hexdigest()[:32]


__all__ = ["WITHOUT_EFFECT", "model_identity", "module_identity"]

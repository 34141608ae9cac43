"""What K and V depend on: every field of every config counts, rotary embeddings as they are in use."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import kvjax.models.configs
from kvjax.device import AttentionOptions, FunctionModel
from kvjax.models.config import ModelConfig
from kvjax.models.configs.rope import ROPE_TYPES, RopeConfig
from kvjax.models.identity import MAX_TEXT, WITHOUT_EFFECT, model_identity, module_identity
from kvjax.models.layers.rotary import attention_factor, inverse_frequencies


def config_classes(base: type = ModelConfig) -> Iterator[type]:
    for module in pkgutil.iter_modules(kvjax.models.configs.__path__):
        importlib.import_module(f"kvjax.models.configs.{module.name}")
    for own in base.__subclasses__():
        if not inspect.isabstract(own) and own.__module__.startswith("kvjax."):
            yield own
        yield from config_classes(own)


def example(hint: Any, other: bool) -> Any:
    """One of two values of a type."""
    arguments = [one for one in typing.get_args(hint) if one is not types.NoneType]
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return example(arguments[0], other)
    if typing.get_origin(hint) is tuple:
        return tuple(example(one, other) for one in arguments if one is not ...)
    if is_dataclass(hint):
        return example_of(typing.cast(type, hint), other)
    if typing.get_origin(hint) is Mapping or typing.get_origin(hint) is dict:
        return {example(arguments[0], False): example(arguments[1], other)}
    return {bool: (False, True), int: (3, 4), float: (1.5, 1.75), str: ("a", "b")}[hint][other]


def example_of(cls: type, other: bool = False) -> Any:
    """An object of a dataclass, made without its checks."""
    made = object.__new__(cls)
    for name, hint in hints_of(cls).items():
        object.__setattr__(made, name, example(hint, other))
    return made


def hints_of(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {one.name: hints[one.name] for one in fields(cls)}


def changed(value: Any) -> Iterator[tuple[str, Any]]:
    """The object with each one of its fields changed, those of objects inside it too, and with each left out."""
    for name, hint in hints_of(type(value)).items():
        own = getattr(value, name)
        parts = dict(changed(own)) if is_dataclass(own) else {"": example(hint, other=True)}
        if types.NoneType in typing.get_args(hint):
            parts["is None"] = None
        for part, one in parts.items():
            made = object.__new__(type(value))
            made.__dict__.update(value.__dict__ | {name: one})
            yield f"{name}.{part}".rstrip("."), made


@pytest.mark.parametrize("cls", sorted(set(config_classes()), key=lambda cls: cls.__name__))
def test_each_field_of_each_config_counts_unless_it_is_listed(cls: type) -> None:
    """What a later version adds to a config counts too: the fields are read off the class."""
    config = example_of(cls)
    identity, num_changes = model_identity(config, None), 0
    for name, other in changed(config):
        is_listed = name.partition(".")[0] in WITHOUT_EFFECT
        assert (model_identity(other, None) == identity) == is_listed, name
        num_changes += 1
    assert num_changes > 10


def random_rope(rng: np.random.Generator) -> RopeConfig:
    factor, original = float(rng.integers(2, 9)), int(rng.integers(16, 64))
    return RopeConfig(
        theta=float(rng.choice([1e4, 1e6])),
        rope_type=str(rng.choice(ROPE_TYPES)),
        factor=factor,
        original_max_len=original,
        short_factor=tuple(rng.uniform(1, 2, 8).tolist()),
        long_factor=tuple(rng.uniform(2, 9, 8).tolist()),
    )


@pytest.mark.parametrize("seed", range(20))
def test_lengths_have_one_identity_where_the_rotary_tables_are_the_same(seed: int) -> None:
    """And only there: a length counts by what it chooses."""
    rng = np.random.default_rng(seed)
    cls = next(cls for cls in config_classes() if cls.__name__ == "LlamaConfig")
    for _ in range(20):
        config = replace(ropeless(cls), rope=random_rope(rng))
        first, second = (replace(config, max_model_len=int(length)) for length in rng.integers(8, 96, 2))
        tables = [inverse_frequencies(one.rope, 16, one.max_model_len) for one in (first, second)]
        same = np.array_equal(*tables) and attention_factor(first.rope) == attention_factor(second.rope)
        assert (model_identity(first, None) == model_identity(second, None)) == same
        other = replace(first, rope=replace(first.rope, theta=first.rope.theta * 2))
        assert model_identity(first, None) != model_identity(other, None)


def ropeless(cls: type) -> Any:
    example = example_of(cls)
    own = dict(example.__dict__, num_layers=1, layer_types=("full_attention",), num_q_heads=4, num_kv_heads=2)
    return cls(**own | {"num_shared_layers": 0, "full_heads": None})


def test_a_long_text_counts_to_its_end() -> None:
    cls = next(cls for cls in config_classes() if cls.__name__ == "LlamaConfig")
    config = ropeless(cls)
    first, second = (replace(config, architecture="a" * 2 * MAX_TEXT + end) for end in "bc")
    texts = [model_identity(one, None)["architecture"] for one in (first, second)]
    assert texts[0] != texts[1]
    assert max(map(len, texts)) <= MAX_TEXT


class OwnLayer(nnx.Module):
    """A stranger's module with a setting that no config knows."""

    def __init__(self, theta: float, values: np.ndarray, hidden: list[float], k_scale: jax.Array | None = None) -> None:
        self.theta = theta
        self.hidden = tuple(hidden)
        self.weight = nnx.Param(values)
        self.options = AttentionOptions(sm_scale=1.0, k_scale=k_scale)

    def __call__(self) -> None:
        """What a model must have."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OwnTree:
    """A stranger's pytree: a weight, a number that is a constant, and a setting that is no leaf."""

    weight: jax.Array
    scale: float
    theta: float = field(metadata={"static": True})


def forward(theta: float) -> None:
    """A model's function."""


def other_forward(theta: float) -> None:
    """Another."""


def test_strangers_models_count_by_class_and_settings_and_not_by_weights_or_address() -> None:
    weight, other = np.ones(3, np.float32), np.zeros(3, np.float32)
    models: list[tuple[Any, Any, list[Any]]] = [
        (
            OwnLayer(1.0, weight, [2.0]),
            OwnLayer(1.0, other, [2.0]),
            [
                OwnLayer(1.5, weight, [2.0]),
                OwnLayer(1.0, weight, [2.5]),
                *(OwnLayer(1.0, weight, [2.0], jax.numpy.float32(scale)) for scale in (0.5, 0.25)),
            ],
        ),
        (
            OwnTree(jax.numpy.ones(3), 1.0, 2.0),
            OwnTree(jax.numpy.zeros(3), 1.0, 2.0),
            [OwnTree(jax.numpy.ones(3), 1.5, 2.0), OwnTree(jax.numpy.ones(3), 1.0, 2.5)],
        ),
        (
            FunctionModel({"a": weight}, partial(forward, 1.0), forward),
            FunctionModel({"a": other}, partial(forward, 1.0), forward),
            [
                FunctionModel({"a": weight}, partial(forward, 2.0), forward),
                FunctionModel({"a": weight}, partial(other_forward, 1.0), forward),
                FunctionModel({"a": weight}, partial(forward, 1.0), other_forward),
            ],
        ),
    ]
    identities = set()
    for model, reweighted, others in models:
        assert module_identity(model) == module_identity(reweighted)
        for one in (model, *others):
            identities.add(module_identity(one))
    assert len(identities) == sum(1 + len(others) for _, _, others in models)

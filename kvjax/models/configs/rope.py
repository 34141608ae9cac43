"""Rotary position embeddings as a config names them: `rope_theta` and `rope_scaling`, or `rope_parameters`. No jax.

Flow:    ConfigKeys -> [take_rope, take_ropes] -> RopeConfig -> layers.rotary
Source:  transformers' modeling_rope_utils.py; `rope_theta` and `rope_scaling` before version 5, `rope_parameters` since
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvjax.errors import ConfigError
from kvjax.models.configs.keys import ConfigKeys

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
_OLD_NAMES = {"su": "longrope", "mrope": "default"}


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of one kind of layer; `rope_type` is one of `ROPE_TYPES`."""

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 0  # of pretraining
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None  # None: what the scaling's paper says
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    # Share of a head's dimensions that are rotated, the first ones; "proportional": the first of each half, with the
    # frequencies that they have where all are rotated.
    partial_rotary_factor: float = 1.0
    mrope_section: tuple[int, ...] = ()  # frequencies for time, height and width; not empty: multimodal positions
    mrope_interleaved: bool = False

    def longest_len(self, max_position_embeddings: int) -> int:
        """Tokens that a model may be run for. "dynamic" stretches pretraining's length, which a config gives, by its
        factor; the others are given in the length that they make.
        """
        if self.rope_type != "dynamic":
            return max_position_embeddings
        return max(max_position_embeddings, int(self.factor * self.original_max_len))


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's temperature for a context that is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def check_factors(rope: RopeConfig, head_dim: int) -> None:
    """Raises ConfigError unless long rope has a factor for every pair of rotated dimensions."""
    pairs = int(head_dim * rope.partial_rotary_factor) // 2
    sizes = (len(rope.short_factor), len(rope.long_factor))
    if rope.rope_type == "longrope" and sizes != (pairs, pairs):
        raise ConfigError(f"expected {pairs} numbers in short_factor and long_factor, got {sizes[0]} and {sizes[1]}")


def take_rope(keys: ConfigKeys, max_len: int, **fields: Any) -> RopeConfig:
    """The one rotary embedding of a model; `fields` hold where the file does not say otherwise."""
    theta = keys.take_float("rope_theta", 10_000.0)
    fields["partial_rotary_factor"] = keys.take_float("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    data = _scaling(keys)
    return _rope_config(data, theta, max_len, f"{keys.where}: rope_parameters", fields)


def take_ropes(keys: ConfigKeys, max_len: int, thetas: Mapping[str, str], **fields: Any) -> dict[str, RopeConfig]:
    """A rotary embedding per layer type. `thetas` names each type's key of older files.

    In those `rope_scaling` is the first type's, the others have none.
    """
    where = f"{keys.where}: rope_parameters"
    base = {kind: keys.take_float(key) for kind, key in thetas.items()}
    data = _scaling(keys)
    if any(kind in data for kind in thetas):
        by_type = ConfigKeys(data, {}, where)
        scalings: Sequence[Mapping[str, Any]] = [by_type.take_object(kind) or {} for kind in thetas]
        by_type.finish(frozenset())
    else:
        scalings = [data, *[{}] * (len(thetas) - 1)]
    return {
        kind: _rope_config(scaling, base[kind], max_len, where, fields)
        for kind, scaling in zip(thetas, scalings, strict=True)
    }


def _scaling(keys: ConfigKeys) -> Mapping[str, Any]:
    scaling = keys.take_object("rope_scaling")
    parameters = keys.take_object("rope_parameters")
    return parameters or scaling or {}


def _rope_config(
    data: Mapping[str, Any], theta: float, max_len: int, where: str, fields: Mapping[str, Any]
) -> RopeConfig:
    """One rotary embedding; `theta` is used where the object has none."""
    keys = ConfigKeys(data, {}, where)
    old_type = keys.take("type", "default")
    rope_type = keys.take("rope_type", old_type)
    rope_type = _OLD_NAMES.get(rope_type, rope_type)
    if rope_type not in ROPE_TYPES:
        raise ConfigError(f"{where}: expected 'rope_type' among {', '.join(ROPE_TYPES)}, got {rope_type!r}")
    values: dict[str, Any] = {**fields, "theta": keys.take_float("rope_theta", theta), "rope_type": rope_type}
    values["partial_rotary_factor"] = keys.take_float("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    values |= _SCALINGS[rope_type](keys, max_len, values.get("original_max_len", max_len))
    sections = keys.take("mrope_section", None)
    if sections is not None:
        values |= {"mrope_section": tuple(sections), "mrope_interleaved": keys.take_flag("mrope_interleaved", False)}
    keys.finish(frozenset())
    return RopeConfig(**values)


def _linear(keys: ConfigKeys, max_len: int, original: int) -> dict[str, Any]:
    del max_len, original
    return {"factor": keys.take_float("factor")}


def _dynamic(keys: ConfigKeys, max_len: int, original: int) -> dict[str, Any]:
    del max_len
    original = keys.take_int("original_max_position_embeddings", original)
    return {"factor": keys.take_float("factor"), "original_max_len": original}


def _llama3(keys: ConfigKeys, max_len: int, original: int) -> dict[str, Any]:
    del max_len
    values: dict[str, Any] = {key: keys.take_float(key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
    return values | {"original_max_len": keys.take_int("original_max_position_embeddings", original)}


def _yarn(keys: ConfigKeys, max_len: int, original: int) -> dict[str, Any]:
    original = keys.take_int("original_max_position_embeddings", original)
    factor = keys.take_float("factor", max_len / original)
    return {
        "factor": factor,
        "original_max_len": original,
        "beta_fast": keys.take_float("beta_fast", 32.0),
        "beta_slow": keys.take_float("beta_slow", 1.0),
        "truncate": keys.take_flag("truncate", True),
        "mscale": float(keys.take("mscale", 0.0)),
        "mscale_all_dim": float(keys.take("mscale_all_dim", 0.0)),
        "attention_factor": keys.take("attention_factor", None),
    }


def _longrope(keys: ConfigKeys, max_len: int, original: int) -> dict[str, Any]:
    original = keys.take_int("original_max_position_embeddings", original)
    return {
        "factor": keys.take_float("factor", max_len / original),
        "original_max_len": original,
        "attention_factor": keys.take("attention_factor", None),
        "short_factor": tuple(keys.take("short_factor")),
        "long_factor": tuple(keys.take("long_factor")),
    }


def _proportional(keys: ConfigKeys, max_len: int, original: int) -> dict[str, Any]:
    del max_len, original
    return {"factor": keys.take_float("factor", 1.0)}


def _default(keys: ConfigKeys, max_len: int, original: int) -> dict[str, Any]:
    del keys, max_len, original
    return {}


_SCALINGS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}

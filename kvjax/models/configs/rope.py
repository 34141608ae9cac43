"""Rotary position embeddings as a config names them: `rope_theta` and `rope_scaling`, or `rope_parameters`. No jax.

Flow:    ConfigKeys -> [take_rope, take_ropes] -> RopeConfig -> layers.rotary
Source:  transformers' modeling_rope_utils.py; `rope_theta` and `rope_scaling` before version 5, `rope_parameters` since
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvjax.errors import ConfigError
from kvjax.models.configs.keys import ConfigKeys

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
_OLD_NAMES = {"su": "longrope", "mrope": "default"}
_OF_OTHER_POSITIONS = frozenset(["mrope_interleaved", "mrope_section"])  # than one a token, where there are none
_STRETCHED = ("llama3", "longrope")


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
    mrope_section: tuple[int, ...] = ()  # frequencies for time, height, width; not empty: such positions
    mrope_interleaved: bool = True  # these stand in turns, else one after the other

    def longest_len(self, max_position_embeddings: int) -> int:
        """Tokens that a model may be run for: what the scaling makes of pretraining's length, as in vLLM.

        Configs of "llama3" and "longrope" give the length that they make; of the others, either.
        """
        if self.rope_type in _STRETCHED:
            return max_position_embeddings
        return max(max_position_embeddings, int(self.factor * self.original_max_len))

    def for_length(self, max_len: int) -> RopeConfig:
        """As it is for sequences of up to `max_len` tokens: what the length chooses, and nothing else of it.

        The `factor` of a "dynamic" one is then what its base is stretched by, 1 within the length of pretraining.
        """
        if self.rope_type == "dynamic":
            stretch = self.factor * max(max_len, self.original_max_len) / self.original_max_len - (self.factor - 1)
            return replace(self, factor=stretch, original_max_len=0)
        if self.rope_type != "longrope":
            return self
        chosen = self.long_factor if max_len > self.original_max_len else self.short_factor
        return replace(self, short_factor=(), long_factor=chosen)


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's temperature for a context that is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def check_factors(rope: RopeConfig, head_dim: int) -> None:
    """Raises ConfigError unless long rope has a factor for every pair of rotated dimensions."""
    pairs = int(head_dim * rope.partial_rotary_factor) // 2
    sizes = (len(rope.short_factor), len(rope.long_factor))
    if rope.rope_type == "longrope" and sizes != (pairs, pairs):
        raise ConfigError(f"expected {pairs} numbers in short_factor and long_factor, got {sizes[0]} and {sizes[1]}")


def take_rope(
    keys: ConfigKeys,
    max_len: int,
    *,
    default: Mapping[str, Any] | None = None,
    beside_rope: frozenset[str] = frozenset(),
    **fields: Any,
) -> RopeConfig:
    """The one rotary embedding of a model.

    Where the file says nothing of it, it is `default`; `fields` hold where the file does not say otherwise. Whole heads
    are rotated unless `partial_rotary_factor` is one of them. Keys of the object in `beside_rope` say other things.

    Raises:
        ConfigError: a value that cannot be, or the file describes two different embeddings.
    """
    beside = {key: keys.given(key) for key in ("rope_theta", "partial_rotary_factor")}
    beside["original_max_position_embeddings"] = fields.pop("original_max_len", None)
    fields["theta"] = keys.take_float("rope_theta", 10_000.0)
    where = f"{keys.where}: rope_parameters"
    forms = [form for name in ("rope_parameters", "rope_scaling") if (form := keys.take_object(name))] or [
        default or {}
    ]
    forms = [{key: value for key, value in form.items() if key not in beside_rope} for form in forms]
    return _only(keys, [_rope_config(form, max_len, where, beside, fields) for form in forms])


def take_ropes(
    keys: ConfigKeys,
    max_len: int,
    thetas: Mapping[str, str],
    *,
    default: Mapping[str, Any] | None = None,
    may_be_flat: bool = False,
    **fields: Any,
) -> dict[str, RopeConfig]:
    """A rotary embedding per layer type. `thetas` names each type's key of older files.

    In those `rope_scaling` is the first type's, the others have none; newer ones have an object for each type in
    `rope_parameters`, which otherwise `may_be_flat`, as `rope_scaling` is. `Raises` as of `take_rope`.
    """
    where = f"{keys.where}: rope_parameters"
    parameters, scaling = keys.take_object("rope_parameters"), keys.take_object("rope_scaling")
    beside = {kind: {"rope_theta": keys.given(key)} for kind, key in thetas.items()}
    base = {kind: {"theta": keys.take_float(key)} for kind, key in thetas.items()}
    if may_be_flat and parameters and not any(kind in parameters for kind in thetas):
        parameters, scaling = scaling, parameters
    if may_be_flat and scaling:
        beside = {kind: {"rope_theta": fields["theta"]} for kind, fields in base.items()}
    elif scaling and "rope_type" not in scaling:
        raise ConfigError(
            f"{keys.where}: expected 'rope_type' in rope_scaling, since 'type' is not read here, got none"
        )
    forms: list[Mapping[str, Any]] = [{next(iter(thetas)): scaling}] if scaling else []
    if parameters or not forms:
        by_type = ConfigKeys(parameters or default or {}, {}, where)
        forms.append({kind: by_type.take_object(kind) for kind in thetas})
        by_type.finish(frozenset())

    def one(kind: str, form: Mapping[str, Any]) -> RopeConfig:
        return _rope_config(form.get(kind) or {}, max_len, where, beside[kind], base[kind] | fields)

    ropes = {kind: _only(keys, [one(kind, form) for form in forms]) for kind in thetas}
    if not all(rope.truncate for rope in ropes.values()):
        raise ConfigError(f"{where}: expected 'truncate' to be true, which transformers reads only of a single one")
    return ropes


def _only(keys: ConfigKeys, ropes: Sequence[RopeConfig]) -> RopeConfig:
    """The one that all are, however the file describes it."""
    if any(rope != ropes[0] for rope in ropes):
        raise ConfigError(
            f"{keys.where}: expected rope_scaling and rope_parameters to say the same, got "
            f"{keys.given('rope_scaling')} and {keys.given('rope_parameters')}: remove one of the two"
        )
    return ropes[0]


def _rope_config(
    data: Mapping[str, Any], max_len: int, where: str, beside: Mapping[str, Any], fields: Mapping[str, Any]
) -> RopeConfig:
    """One rotary embedding; what the file has `beside` the object must not contradict it."""
    keys = ConfigKeys(data, {}, where)
    for key, value in beside.items():
        if None not in (value, keys.given(key)) and value != keys.given(key):
            raise ConfigError(f"{where}: expected one {key!r}, got {keys.given(key)!r} and beside the object {value!r}")
    old_type = keys.take("type", keys.given("rope_type") or "default")
    old_type, rope_type = (_OLD_NAMES.get(name, name) for name in (old_type, keys.take("rope_type", old_type)))
    if rope_type != old_type:
        raise ConfigError(f"{where}: expected one 'rope_type', got {rope_type!r} and as 'type' {old_type!r}")
    if rope_type not in ROPE_TYPES:
        raise ConfigError(f"{where}: expected 'rope_type' among {', '.join(ROPE_TYPES)}, got {rope_type!r}")
    values: dict[str, Any] = {**fields, "theta": keys.take_float("rope_theta", fields["theta"]), "rope_type": rope_type}
    values["partial_rotary_factor"] = _take_share(keys, rope_type, beside, fields)
    original = beside.get("original_max_position_embeddings") or max_len
    values |= _SCALINGS[rope_type](keys, max_len, original)
    if "mrope_section" in fields:
        values["mrope_section"] = tuple(keys.take("mrope_section", fields["mrope_section"]))
        keys.require("mrope_interleaved", fields.get("mrope_interleaved", True))
    keys.finish(_OF_OTHER_POSITIONS)
    return RopeConfig(**values)


def _take_share(keys: ConfigKeys, rope_type: str, beside: Mapping[str, Any], fields: Mapping[str, Any]) -> float:
    """The share of a head that is rotated; other than all of it only in families that have such a share."""
    own = fields.get("partial_rotary_factor", 1.0)
    share = keys.take_float("partial_rotary_factor", beside.get("partial_rotary_factor") or own)
    if share != 1.0 and "partial_rotary_factor" not in fields and rope_type != "proportional":
        raise ConfigError(
            f"{keys.where}: expected 'partial_rotary_factor' to be 1, as transformers takes it, got {share}"
        )
    return share


def _linear(keys: ConfigKeys, max_len: int, original: int) -> dict[str, Any]:
    del max_len
    return {
        "factor": keys.take_float("factor"),
        "original_max_len": keys.take_int("original_max_position_embeddings", original),
    }


def _dynamic(keys: ConfigKeys, max_len: int, original: int) -> dict[str, Any]:
    values = _linear(keys, max_len, original)
    if values["original_max_len"] != max_len:
        raise ConfigError(
            f"{keys.where}: expected 'original_max_position_embeddings' to be max_position_embeddings, {max_len}, from "
            f"which transformers stretches, got {values['original_max_len']}"
        )
    return values


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
    del max_len
    return {"factor": keys.take_float("factor", 1.0), "original_max_len": original}


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

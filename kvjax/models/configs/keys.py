"""The keys of one config.json object, each to be taken once and checked; what nobody takes is unknown.

Flow:    dict -> [ConfigKeys] -> a config class of this folder
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from kvjax.errors import ConfigError
from kvjax.models.configs.informational import INFORMATIONAL_OUTER_KEYS

WEIGHT_DTYPES = ("float32", "bfloat16", "float16")
MAX_INT = 2**31 - 1
MAX_LAYERS = 10_000
MAX_TAPS = 256  # of a short convolution
MAX_FLOAT = 1e30
_REQUIRED = object()
_TIED = "tie_word_embeddings"


def end_tokens(value: Any, where: str) -> tuple[int, ...]:
    """`eos_token_id` of a config.json or generation_config.json: null, a token, or a list of tokens.

    Raises:
        ConfigError: it is something else.
    """
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise ConfigError(
            f"{where}: expected 'eos_token_id' as a token id >= 0, a list of them, or null, got {value!r}"
        )
    return tuple(tokens)


class ConfigKeys:
    """A config's keys, each to be taken once; what is left over at the end is unknown."""

    def __init__(self, data: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
        self.where = where
        self._data = data
        self._defaults = defaults
        self._taken: set[str] = set()

    def take(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value; a missing or null one is the architecture's default, else `default`."""
        self._taken.add(key)
        value = self._data.get(key)
        if value is None:
            value = self._defaults.get(key, default)
        if value is _REQUIRED:
            raise ConfigError(f"{self.where}: expected the key {key!r}, got none")
        return value

    def given(self, key: str) -> Any:
        """The file's own value, None where it has none."""
        self._taken.add(key)
        return self._data.get(key)

    def take_nullable(self, key: str) -> Any:
        """The value, where an explicit null means none and only a missing key means the architecture's default."""
        self._taken.add(key)
        return self._data[key] if key in self._data else self._defaults.get(key)

    def take_int(self, key: str, default: Any = _REQUIRED, most: int | None = None) -> int:
        """A positive integer of at most `most`; None: of 31 bits, or `MAX_LAYERS` where it counts layers."""
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.where}: expected {key!r} to be a positive integer, got {value!r}")
        if most is None:
            most = MAX_LAYERS if key.endswith("layers") else MAX_INT
        if value > most:
            raise ConfigError(f"{self.where}: expected {key!r} of at most {most}, got {value!r:.40}")
        return value

    def take_index(self, key: str) -> int:
        """An integer from 0 on."""
        value = self.take(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{self.where}: expected {key!r} to be an integer >= 0, got {value!r}")
        if value > MAX_INT:
            raise ConfigError(f"{self.where}: expected {key!r} of at most {MAX_INT}, got {value!r:.40}")
        return value

    def take_float(self, key: str, default: Any = _REQUIRED) -> float:
        """A positive number."""
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_FLOAT:
            raise ConfigError(f"{self.where}: expected {key!r} to be a positive number, got {value!r}")
        return float(value)

    def take_flag(self, key: str, default: bool) -> bool:
        """True or false; null is false, and a missing key the architecture's default, else `default`."""
        value = self.take(key, default) if self._data.get(key, default) is not None else False
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: expected {key!r} to be true or false, got {value!r}")
        return value

    def take_object(self, key: str) -> Mapping[str, Any] | None:
        """A JSON object, or None."""
        value = self.take(key, None)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{self.where}: expected {key!r} to be an object, got {value!r}")
        return value

    def finish(self, informational: frozenset[str]) -> None:
        """Raises ConfigError where keys are left that say something: those that are null, false or empty do not."""
        left = set(self._data) - self._taken - informational
        unknown = sorted(key for key in left if self._data[key] not in (None, [], {}) and self._data[key] is not False)
        if unknown:
            raise ConfigError(
                f"{self.where}: unknown keys {', '.join(unknown)}; expected none beyond those this version reads: "
                f"remove them only if they do not change what the model computes"
            )

    def take_ints(self, key: str) -> tuple[int, ...]:
        """A list of non-negative integers."""
        value = self.take(key)
        if not isinstance(value, list) or any(isinstance(x, bool) or not isinstance(x, int) or x < 0 for x in value):
            raise ConfigError(f"{self.where}: expected {key!r} to be a list of integers >= 0, got {value!r}")
        return tuple(value)

    def take_layer_types(self, default: tuple[str, ...], known: tuple[str, ...]) -> tuple[str, ...]:
        """`layer_types`, one of `known` names for each layer of `default`."""
        types = self.take("layer_types", default)
        if not isinstance(types, list | tuple) or not all(isinstance(one, str) for one in types):
            raise ConfigError(f"{self.where}: expected 'layer_types' to be a list of names, got {types!r:.80}")
        types = tuple(types)
        if len(types) != len(default):
            raise ConfigError(
                f"{self.where}: expected {len(default)} layer_types (num_hidden_layers), got {len(types)}"
            )
        unknown = sorted(set(types) - set(known))
        if unknown:
            raise ConfigError(f"{self.where}: expected layer_types among {', '.join(known)}, got {', '.join(unknown)}")
        return types

    def take_choice(self, key: str, choices: tuple[str, ...], default: Any = _REQUIRED) -> str:
        """One of the names in `choices`."""
        name = self.take(key, default)
        if name not in choices:
            raise ConfigError(f"{self.where}: expected {key!r} among {', '.join(choices)}, got {name!r}")
        return str(name)

    def require(self, key: str, value: Any) -> None:
        """Raises ConfigError where the file has another value of `key` than the one that transformers computes with."""
        got = self.take(key, value)
        if got != value:
            raise ConfigError(
                f"{self.where}: expected {key!r} to be {json.dumps(value)}, got {json.dumps(got)}: transformers "
                "computes with nothing else"
            )

    def refuse(self, key: str, remedy: str) -> None:
        """Raises ConfigError where `key` is neither missing, null nor false."""
        value = self.take(key, None)
        if value is not None and value is not False:
            raise ConfigError(f"{self.where}: expected {key!r} to be null or false, got {value!r}: {remedy}")

    def take_eos(self) -> tuple[int, ...]:
        """`eos_token_id`, of which there may be none, one or several."""
        return end_tokens(self.take_nullable("eos_token_id"), self.where)

    def take_dtype(self) -> str:
        """`dtype`, or `torch_dtype` of older files; float32 where neither is."""
        old = self.take("torch_dtype", "float32")
        name = self.take("dtype", old)
        if name not in WEIGHT_DTYPES:
            raise ConfigError(f"{self.where}: expected 'dtype' among {', '.join(WEIGHT_DTYPES)}, got {name!r}")
        return str(name)


class OuterForm(Protocol):
    """What the class of a multimodal config says of its outer object, as `ModelConfig` has it."""

    defaults: ClassVar[Mapping[str, Any]]
    outer_keys: ClassVar[tuple[str, ...]]
    outer_ignored_keys: ClassVar[frozenset[str]]
    tied_by: ClassVar[str]


def text_keys(data: Mapping[str, Any], form: type[OuterForm], where: str) -> ConfigKeys:
    """The language model's keys of a multimodal config, `text_config`, with those that the outer object decides.

    The outer object's keys of `form.outer_keys` are among them. Of keys that may stand in both:

        bos_token_id, eos_token_id   the outer's, unless it is missing or null; so with quantization_config
        dtype, torch_dtype           the outer's, in either spelling, unless both are missing or null
        tie_word_embeddings          by `form.tied_by`: the outer's or `text_config`'s and never the other; true if
                                     either is; the outer's if it is there, else `text_config`'s. null is false.
        any other                    `text_config`'s; the outer may repeat it

    Source: transformers' from_pretrained, GenerationConfig.from_model_config, get_expanded_tied_weights_keys

    Raises:
        ConfigError: there is no `text_config`, or the outer object has unknown keys.
    """
    outer = ConfigKeys(data, {}, where)
    own = outer.take_object("text_config")
    if own is None:
        raise ConfigError(f"{where}: expected the key 'text_config', got none")
    first = ("bos_token_id", "eos_token_id", "quantization_config")
    decided = {key: value for key in first if (value := outer.given(key)) is not None}
    dtype = outer.given("dtype") or outer.given("torch_dtype")
    decided |= {} if dtype is None else {"dtype": dtype}
    decided |= {key: outer.given(key) for key in form.outer_keys if key in data}
    text = dict(own)
    tied = {name: part[_TIED] or False for name, part in (("outer", data), ("text", own)) if _TIED in part}
    text.pop(_TIED, None)
    outer.given(_TIED)
    if form.tied_by == "either":
        decided[_TIED] = tied.get("outer", False) or tied.get("text", False)
    else:
        decided |= next(({_TIED: tied[name]} for name in form.tied_by.split(" or ") if name in tied), {})
    repeated = {key for key in data if key in own and data[key] == own[key]}
    decided["architectures"] = outer.take("architectures")
    outer.finish(INFORMATIONAL_OUTER_KEYS | form.outer_ignored_keys | repeated)
    return ConfigKeys(text | decided, form.defaults, f"{where}: text_config")

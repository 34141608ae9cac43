"""What the rest of kvjax has to know of any model: its sizes, the cache of its layers, what it takes as input. No jax.

Flow:    config.json of a Hugging Face folder -> (registry) -> a family's [ModelConfig] -> decoder, planner, engine

A family's own config is a subclass in `kvjax.models.configs`; what only its decoder reads is its own.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvjax.core.spec import KVCacheSpec
from kvjax.errors import ConfigError
from kvjax.models.configs.keys import end_tokens

if TYPE_CHECKING:
    from kvjax.models.configs.rope import RopeConfig

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
RECURRENT = "linear_attention"
FEED_FORWARD = "feed_forward"  # a layer without a cache
DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class StreamingWindow:
    """StreamingLLM (arXiv 2309.17453): every query sees the last `size` tokens, itself included, and the first ones.

    Positions are those of the whole text, so it runs for as long as the model's rotary embeddings do; its cache does
    not grow. With `keeps_prompt` queries see the whole prompt, and of the answer the window (R-SWA).

    Raises:
        ValueError: `size` is below 1, or `num_sink_tokens` below 0.
    """

    size: int
    num_sink_tokens: int = 4  # first tokens, where not the whole prompt is seen
    keeps_prompt: bool = False

    def __post_init__(self) -> None:
        if self.size < 1 or self.num_sink_tokens < 0:
            raise ValueError(
                f"expected a window of at least 1 token and num_sink_tokens >= 0, got {self.size} and "
                f"{self.num_sink_tokens}"
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig(abc.ABC):
    """One language model. Hashable, so that it may be static in jitted functions."""

    default_block_size: ClassVar[int] = DEFAULT_BLOCK_SIZE
    defaults: ClassVar[Mapping[str, Any]] = {}  # of keys that files on the Hub leave out
    key_aliases: ClassVar[Mapping[str, str]] = {}  # names of keys in files, with those read here
    outer_keys: ClassVar[tuple[str, ...]] = ()  # read beside those of `text_config`
    outer_ignored_keys: ClassVar[frozenset[str]] = frozenset()  # beside `text_config`, which change nothing here
    # Whose `tie_word_embeddings` decides: that "outer" of `text_config`, that "text", "either", "outer or text".
    tied_by: ClassVar[str] = "outer"
    counts_scaling: ClassVar[bool] = False  # `max_position_embeddings` is the length that rotary scalings make
    ignored_keys: ClassVar[frozenset[str]] = frozenset()  # of the family, which change nothing that is computed

    architecture: str
    num_layers: int
    vocab_size: int
    max_model_len: int
    dtype: str = "float32"  # of the checkpoint
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    quant_method: str | None = None  # how a checkpoint's weights are quantised

    @property
    @abc.abstractmethod
    def cache_words(self) -> str:
        """What a token's cache is made of, such as "8 KV heads of 128"."""

    @abc.abstractmethod
    def kv_cache_specs(self, block_size: int | None = None, dtype: str | None = None) -> dict[str, KVCacheSpec]:
        """Cache of every layer that has one, by its name; None: the model's own block size and dtype."""

    @property
    def cache_dtype(self) -> str:
        """The dtype of caches unless another is asked for."""
        return self.dtype

    @property
    def shared_layers(self) -> dict[str, str]:
        """Layers that read the pages of another layer, with that layer."""
        return {}

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary embeddings of its layers."""
        return ()

    @property
    def rotation(self) -> tuple[RopeConfig, ...]:
        """The rotary embeddings of its layers as they are for sequences of up to `max_model_len` tokens."""
        return tuple(rope.for_length(self.max_model_len) for rope in self.ropes)

    @property
    def longest_len(self) -> int:
        """Tokens that the config's rotary scalings allow, where `max_model_len` is what the file says."""
        if self.counts_scaling:
            return self.max_model_len
        return max([self.max_model_len, *(rope.longest_len(self.max_model_len) for rope in self.ropes)])

    @property
    def ignored_tensors(self) -> tuple[str, ...]:
        """Beginnings of the names, without the checkpoint's prefix, of tensors that no layer of this config has."""
        return ()

    @property
    def encoder_shapes(self) -> Mapping[tuple[int, ...], int]:
        """Shapes that the features of a request's encoder input may have, with the encoder tokens of each.

        Where there are any, the module has `encode(features, cache)`; `cache` is a `kvjax.device.EncoderCache`.
        """
        return {}

    @property
    def embedding_dim(self) -> int | None:
        """Numbers of a vector that stands for a token; None: every token is one of the vocabulary.

        Where there are, the module is called with `embeds=(vectors[rows, embedding_dim], index int32[T])`, -1: a token.
        """
        return None

    @property
    def placeholder_token_ids(self) -> tuple[int, ...]:
        """Tokens that vectors stand for."""
        return ()

    @property
    def has_mrope(self) -> bool:
        """Whether the module takes positions int32[3, T]."""
        return False

    @property
    def split_units(self) -> Mapping[str, int]:
        """Words for what devices share among them -> how many there are, which must divide over the devices."""
        return {}

    def check_split(self, num_shards: int) -> None:
        """Raises ValueError where the model does not split over `num_shards` devices."""
        for name, count in self.split_units.items():
            if count % num_shards:
                raise ValueError(f"expected {name} to divide over {num_shards} devices, got {count}")

    def splits_cache(self, num_shards: int) -> bool:
        """Whether pages are split over `num_shards` devices; else each holds them whole."""
        return num_shards == 1

    def for_length(self, max_model_len: int) -> ModelConfig:
        """The model as it is for sequences of at most `max_model_len` tokens; rotary scalings may go by that."""
        return replace(self, max_model_len=max_model_len)

    def for_streaming(self, window: StreamingWindow) -> ModelConfig:
        """The model with `window` in place of full attention, with the same weights.

        Raises:
            ValueError: its layers do not all have full attention.
        """
        raise ValueError(
            f"expected a model whose layers all have full attention, got {self.architecture}: a window of "
            f"{window.size} tokens cannot stand in its place"
        )

    @classmethod
    def of_file(cls, data: Mapping[str, Any]) -> tuple[type[ModelConfig], Mapping[str, Any]]:
        """The class of a file of this architecture, and what it is to read: mostly itself, and the file as it is."""
        return cls, data

    @staticmethod
    def from_dict(data: Mapping[str, Any], *, where: str = "config") -> ModelConfig:
        """The config that a parsed config.json describes; keys of older and newer transformers are both read.

        Raises:
            ConfigError: an unknown key or architecture, a missing key, or a value that cannot be; `where` and the
                key are in the message.
        """
        from kvjax.models.registry import parse_config

        return parse_config(data, where)

    @staticmethod
    def from_folder(folder: str | Path) -> ModelConfig:
        """The config of a Hugging Face folder; end tokens of a generation_config.json, if not null, take precedence.

        Raises:
            ConfigError: no config.json, one that is not a JSON object, end tokens that are none, or as `from_dict`.
        """
        folder = Path(folder)
        path = folder / "config.json"
        if not path.is_file():
            raise ConfigError(
                f"expected a Hugging Face model folder with {path.name}, found no {path}{_remedy(folder)}"
            )
        config = ModelConfig.from_dict(read_json_object(path), where=str(path))
        generation = folder / "generation_config.json"
        if generation.is_file():
            eos = read_json_object(generation).get("eos_token_id")
            if eos is not None:
                config = replace(config, eos_token_ids=end_tokens(eos, str(generation)))
        return config


def _remedy(folder: Path) -> str:
    """What to do where `folder` has no config.json."""
    if folder.is_file():
        return f"; {folder} is a file: give the folder that it is in"
    quantised = sorted(file.name for file in folder.glob("*.gguf")) if folder.is_dir() else []
    if quantised:
        return (
            f"; {quantised[0]} has weights quantised by GGUF, which is not read: take the model's release in "
            "safetensors files"
        )
    if folder.exists() or folder.is_absolute() or len(folder.parts) > 2:
        return ""
    return (
        f"; if {folder.as_posix()} is a model of the Hub, fetch it first: hf download {folder.as_posix()} "
        f"--local-dir {folder.name}"
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ConfigError: it holds no JSON, or other than an object.
        OSError: it cannot be read.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: expected JSON, got {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data

"""DeepSeek V4: a window in every layer, entries of several tokens beside it, hyper-connections, hashed experts. No jax.

Flow:    config.json -> [DeepseekV4Config] -> decoders.deepseek_v4
Source:  transformers' configuration_deepseek_v4.py, whose defaults files on the Hub leave out; caches: ARCHITECTURE.md
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, ClassVar, Self

from kvjax.core.kinds.mla import MLAAttentionSpec, SlidingWindowMLASpec
from kvjax.core.spec import KVCacheSpec
from kvjax.errors import ConfigError
from kvjax.models.config import SLIDING
from kvjax.models.configs.decoder import DecoderConfig, take_sizes
from kvjax.models.configs.experts import SCORES, ExpertsConfig
from kvjax.models.configs.keys import ConfigKeys
from kvjax.models.configs.rope import RopeConfig, take_ropes
from pallas_kernels.layouts import dtype_bits

FP8 = "float8_e4m3fn"
FP8_GROUP = 64  # numbers of a latent that share a scale
INDEXED = "compressed_sparse_attention"
POOLED = "heavily_compressed_attention"
_RATES = {INDEXED: 4, POOLED: 128}
_OLD_TYPES = {0: SLIDING, 4: INDEXED, 128: POOLED}  # of `compress_ratios`


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """Entries of a layer beside its window."""

    ratio: int  # tokens of an entry
    is_indexed: bool  # an indexer picks entries, which overlap; else all are seen

    @property
    def series(self) -> int:
        """Vectors that a token has: one for its own entry, with overlap one for the next besides."""
        return 2 if self.is_indexed else 1

    def states(self, dim: int) -> SlidingWindowMLASpec:
        """Cache of the compressor's inputs and scores, for entries of `dim` numbers."""
        return SlidingWindowMLASpec(
            block_size=self.ratio if self.is_indexed else max(self.ratio // 16, 1),
            head_size=2 * self.series * dim,
            dtype="float32",
            sliding_window=self.series * self.ratio,
        )


@dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """What picks a query's entries."""

    num_heads: int
    head_dim: int
    topk: int


@dataclass(frozen=True, kw_only=True)
class HyperConfig:
    """Hyper-connections: the residual is several streams, mixed around each part of a layer."""

    num_streams: int
    num_iterations: int  # of Sinkhorn and Knopp
    eps: float


@dataclass(frozen=True, kw_only=True)
class DeepseekV4Config(DecoderConfig):
    """All of it but the layers that predict further tokens."""

    default_block_size: ClassVar[int] = 256
    window_block_size: ClassVar[int] = 64
    defaults: ClassVar[Mapping[str, Any]] = {
        "bos_token_id": 0,
        "eos_token_id": 1,
        "head_dim": 512,
        "q_lora_rank": 1024,
        "rope_theta": 10_000.0,
        "compress_rope_theta": 160_000.0,
        "num_hash_layers": 3,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "n_routed_experts": 256,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "sliding_window": 128,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
    }
    key_aliases: ClassVar[Mapping[str, str]] = {"intermediate_size": "moe_intermediate_size"}
    ignored_keys: ClassVar[frozenset[str]] = frozenset(
        ["expert_dtype", "num_nextn_predict_layers", "router_jitter_noise"]
    )

    num_heads: int
    head_dim: int  # of queries, latents and entries
    query_rank: int
    sliding_window: int
    compression: tuple[CompressionConfig | None, ...]  # per layer; None: it has its window only
    indexer: IndexerConfig
    rope: RopeConfig  # of layers with a window only; `partial_rotary_factor` of `head_dim` is rotated, the last ones
    rope_compressed: RopeConfig  # of the others
    out_groups: int  # of heads, each with a projection of its own
    out_rank: int  # what a group's projection makes
    hyper: HyperConfig
    experts: ExpertsConfig
    hashed_layers: tuple[bool, ...]  # per layer: whether a token's id says which experts it has

    @property
    def rope_dim(self) -> int:
        """Dimensions of a latent that are rotated, and not quantised."""
        return int(self.head_dim * self.rope.partial_rotary_factor)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary embeddings of both kinds of layers."""
        return self.rope, self.rope_compressed

    @property
    def cache_dtype(self) -> str:
        """The dtype of caches unless another is asked for: fp8 where weights are quantised and its groups divide."""
        is_whole = (self.head_dim - self.rope_dim) % FP8_GROUP == 0
        return FP8 if self.quant_method is not None and is_whole else self.dtype

    @property
    def cache_words(self) -> str:
        """The latent of a layer, and at which ratios it is compressed."""
        ratios = [compression.ratio for compression in self.compression if compression is not None]
        words = [f"{ratios.count(ratio)} layers / {ratio}" for ratio in sorted(set(ratios))]
        return ", ".join([f"a latent of {self.head_dim}", *words])

    @property
    def split_units(self) -> Mapping[str, int]:
        """Heads, and columns of experts."""
        return {"query heads": self.num_heads, "columns of an expert": self.experts.intermediate_size}

    def splits_cache(self, num_shards: int) -> bool:
        """Whether devices share the query heads, each with all latents and entries."""
        return self.num_heads % num_shards == 0

    def kv_cache_specs(self, block_size: int | None = None, dtype: str | None = None) -> dict[str, KVCacheSpec]:
        """Caches of layer i: `layers.{i}.compressed`, `.indexer`, `.window`, `.states` and `.indexer_states`.

        All of one sort stand together, those of small ratios first.

        Raises:
            ValueError: `block_size` is no multiple of all ratios.
        """
        block_size, dtype = block_size or self.default_block_size, dtype or self.cache_dtype
        layers = [(i, compression) for i, compression in enumerate(self.compression) if compression is not None]
        layers.sort(key=lambda layer: layer[1].ratio)
        unit = lcm(*(compression.ratio for _, compression in layers))
        if block_size % unit:
            raise ValueError(
                f"expected block_size to be a multiple of {unit} (all compression ratios), got {block_size}"
            )
        entry, index_entry = self._entry(dtype), self._index_entry(dtype)
        indexed = [(i, compression) for i, compression in layers if compression.is_indexed]
        window = SlidingWindowMLASpec(block_size=self.window_block_size, sliding_window=self.sliding_window, **entry)
        specs: dict[str, KVCacheSpec] = {}
        for sort, chosen, fields in (("compressed", layers, entry), ("indexer", indexed, index_entry)):
            for i, compression in chosen:
                specs[f"layers.{i}.{sort}"] = MLAAttentionSpec(
                    block_size=block_size, tokens_per_state=compression.ratio, **fields
                )
        specs |= {f"layers.{i}.window": window for i in range(self.num_layers)}
        specs |= {f"layers.{i}.states": compression.states(self.head_dim) for i, compression in layers}
        dim = self.indexer.head_dim
        return specs | {f"layers.{i}.indexer_states": compression.states(dim) for i, compression in indexed}

    def _entry(self, dtype: str) -> dict[str, Any]:
        """In fp8 a byte a number, rotary ones in bfloat16, and a scale byte for each group (one is padding)."""
        if dtype_bits(dtype) > 8:
            return {"head_size": self.head_dim, "dtype": dtype}
        return {
            "head_size": self.head_dim - self.rope_dim + 2 * self.rope_dim + self.head_dim // FP8_GROUP,
            "dtype": "int8",
        }

    def _index_entry(self, dtype: str) -> dict[str, Any]:
        """In fp8 with one float32 scale."""
        if dtype_bits(dtype) > 8:
            return {"head_size": self.indexer.head_dim, "dtype": dtype}
        return {"head_size": self.indexer.head_dim + 4, "dtype": "int8"}

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Self:
        """The config that `keys` describe."""
        sizes = take_sizes(keys)
        num_layers, head_dim = sizes["num_layers"], keys.take_int("head_dim")
        num_heads, groups = keys.take_int("num_attention_heads"), keys.take_int("o_groups")
        if num_heads % groups:
            raise ConfigError(f"{keys.where}: expected o_groups to divide {num_heads} heads, got {groups}")
        for key in ("attention_bias", "mlp_bias"):
            keys.refuse(key, "DeepSeek V4 has no biases")
        for key in ("num_key_value_heads", "n_shared_experts"):
            keys.require(key, 1)
        ropes = _take_ropes(keys, sizes["max_model_len"], head_dim)
        return cls(
            **sizes,
            intermediate_size=keys.take_int("moe_intermediate_size"),
            num_heads=num_heads,
            head_dim=head_dim,
            query_rank=keys.take_int("q_lora_rank"),
            sliding_window=keys.take_int("sliding_window"),
            compression=_take_compression(keys, num_layers),
            indexer=IndexerConfig(
                num_heads=keys.take_int("index_n_heads"),
                head_dim=keys.take_int("index_head_dim"),
                topk=keys.take_int("index_topk"),
            ),
            rope=ropes["main"],
            rope_compressed=ropes["compress"],
            out_groups=groups,
            out_rank=keys.take_int("o_lora_rank"),
            hyper=HyperConfig(
                num_streams=keys.take_int("hc_mult"),
                num_iterations=keys.take_int("hc_sinkhorn_iters"),
                eps=keys.take_float("hc_eps"),
            ),
            experts=_take_experts(keys),
            hashed_layers=_take_hashed(keys, num_layers),
        )


def _take_experts(keys: ConfigKeys) -> ExpertsConfig:
    keys.take_choice("topk_method", ("noaux_tc",), "noaux_tc")
    keys.require("norm_topk_prob", True)
    return ExpertsConfig(
        num_experts=keys.take_int("n_routed_experts"),
        top_k=keys.take_int("num_experts_per_tok"),
        intermediate_size=keys.take_int("moe_intermediate_size"),
        norm_topk=True,
        score=keys.take_choice("scoring_func", SCORES, "sqrtsoftplus"),
        scale=keys.take_float("routed_scaling_factor"),
        limit=keys.take_float("swiglu_limit"),
    )


def _take_ropes(keys: ConfigKeys, max_model_len: int, head_dim: int) -> dict[str, RopeConfig]:
    """Rotary embeddings: "main" of layers with a window only, "compress" of the others, which older files scale."""
    rope_dim = keys.take("qk_rope_head_dim", None)
    share = 64 / 512 if rope_dim is None else keys.take_int("qk_rope_head_dim") / head_dim
    share = keys.take_float("partial_rotary_factor", share)
    thetas = {"compress": "compress_rope_theta", "main": "rope_theta"}
    ropes = take_ropes(keys, max_model_len, thetas, may_be_flat=True, partial_rotary_factor=share)
    compress, is_older = ropes["compress"], "compress" not in (keys.take_object("rope_parameters") or {})
    if is_older and compress.rope_type == "yarn" and compress.attention_factor is None:
        ropes["compress"] = replace(compress, attention_factor=1.0)  # YaRN's temperature is not applied
    return ropes


def _take_compression(keys: ConfigKeys, num_layers: int) -> tuple[CompressionConfig | None, ...]:
    """By `layer_types`, or `compress_ratios` of older files; both may go on for layers that predict further tokens."""
    rates = ConfigKeys(keys.take_object("compress_rates") or {}, _RATES, f"{keys.where}: compress_rates")
    ratios = {INDEXED: rates.take_int(INDEXED), POOLED: rates.take_int(POOLED)}
    rates.finish(frozenset())
    old = keys.take("compress_ratios", None)
    if old is not None:
        old = keys.take_ints("compress_ratios")
        if len(old) < num_layers or set(old) - set(_OLD_TYPES):
            raise ConfigError(
                f"{keys.where}: expected compress_ratios among {sorted(_OLD_TYPES)} for each of {num_layers} layers, "
                f"got {list(old)}"
            )
        default = tuple(_OLD_TYPES[ratio] for ratio in old)
    else:
        default = (POOLED, POOLED, *(INDEXED if i % 2 else POOLED for i in range(num_layers)))
    types = keys.take_layer_types(default[:num_layers], (SLIDING, INDEXED, POOLED))
    made = {kind: CompressionConfig(ratio=ratio, is_indexed=kind == INDEXED) for kind, ratio in ratios.items()}
    return tuple(made.get(kind) for kind in types)


def _take_hashed(keys: ConfigKeys, num_layers: int) -> tuple[bool, ...]:
    """By `mlp_layer_types`, or `num_hash_layers` of older files."""
    num_hashed = keys.take_index("num_hash_layers")
    types = keys.take("mlp_layer_types", ["hash_moe"] * num_hashed + ["moe"] * max(num_layers - num_hashed, 0))
    if len(types) < num_layers or set(types) - {"hash_moe", "moe"}:
        raise ConfigError(
            f"{keys.where}: expected mlp_layer_types among hash_moe, moe for each of {num_layers} layers, got {types}"
        )
    return tuple(kind == "hash_moe" for kind in types[:num_layers])

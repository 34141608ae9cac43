"""Which part of a layer's cache lies on which device, under tensor, data and context parallelism.

Flow:    Parallelism, KVCacheSpec -> [Parallelism.share_of] -> the heads and tokens of one rank
Source:  placement of vLLM: heads over tensor ranks, token t on context rank `t % size`, requests over replicas

    tensor            ranks split the KV heads; with more ranks than heads each head lies on several
    page_context      ranks split the tokens of every page, whose `block_size` counts those of all
    decode_context    of the tensor ranks that hold the same heads, this many split the tokens among them
    prefill_context   further ranks that split the tokens
    data              replicas: each has requests, a manager and a cache of its own

All ranks of a replica use the same block ids. With c ranks of decode or prefill context a block id stands for
c * block_size tokens, of which each holds `block_size`, so a rank's pages keep their size and a request needs a c-th
of the ids. `page_context` says the same from the other side: `block_size` counts all tokens, of any kind of layer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvjax.core.spec import KVCacheSpec
from kvjax.planning.spec_rules import num_shards


@dataclass(frozen=True)
class RankShare:
    """What one rank holds of a layer's cache: some KV heads, of every `token_stride`-th token from `first_token` on."""

    replica: int
    heads: range
    first_token: int
    token_stride: int


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How many ranks share what. Ranks count tensor fastest, then prefill context, then data."""

    tensor: int = 1  # ranks that split the heads
    data: int = 1  # replicas, each with pools of its own
    decode_context: int = 1  # tensor ranks with the same heads that split the tokens among them
    prefill_context: int = 1  # further ranks that split the tokens
    page_context: int = 1  # ranks that split the tokens of every page

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"expected {field.name}_parallel >= 1, got {getattr(self, field.name)}")
        if self.page_context > 1 and self.context > 1:
            raise ValueError(
                f"expected context ranks that share pages or ranks that share blocks, got {self.page_context} of the "
                f"first and {self.context} of the others"
            )

    @property
    def num_devices(self) -> int:
        """Ranks of all replicas."""
        return self.tensor * self.prefill_context * self.page_context * self.data

    @property
    def context(self) -> int:
        """Ranks that split the tokens of one head."""
        return self.decode_context * self.prefill_context

    def check(self, spec: KVCacheSpec) -> None:
        """Whether a layer of `spec` can be laid out so.

        Raises:
            ValueError: the heads do not split over the tensor ranks, or `decode_context` not over those of one head.
            NotImplementedError: the kind cannot split its tokens.
        """
        heads = num_shards(spec)
        if heads % self.tensor and self.tensor % heads:
            raise ValueError(
                f"expected tensor_parallel to divide the {heads} {_parts_of(spec)} or to be a multiple of them, "
                f"got {self.tensor}"
            )
        if spec.state_pages is None and spec.block_size % self.page_context:
            raise ValueError(
                f"expected a block_size that splits over {self.page_context} context ranks, got {spec.block_size}"
            )
        copies = max(self.tensor // heads, 1)
        if copies % self.decode_context:
            raise ValueError(
                f"expected decode_context_parallel to divide the {copies} tensor ranks that hold the same "
                f"{_parts_of(spec)}, "
                f"got {self.decode_context}"
            )
        if self.context > 1 and not spec.supports_context_parallelism:
            raise NotImplementedError(
                f"{spec.kind} layers do not work with context parallelism, got {self.context} context ranks; expected 1"
            )

    def share_of(self, spec: KVCacheSpec, rank: int) -> RankShare:
        """What `rank` holds of a layer of `spec`."""
        heads, tensor_rank = num_shards(spec), rank % self.tensor
        per_rank, copies = max(heads // self.tensor, 1), max(self.tensor // heads, 1)
        first_head = tensor_rank // copies * per_rank
        num_contexts = self.prefill_context * self.page_context
        prefill_rank = rank // self.tensor % num_contexts
        return RankShare(
            replica=rank // (self.tensor * num_contexts),
            heads=range(first_head, first_head + per_rank),
            first_token=prefill_rank * self.decode_context + tensor_rank % self.decode_context,
            token_stride=self.context * self.page_context,
        )


def _parts_of(spec: KVCacheSpec) -> str:
    return "parts of a state" if spec.kind == "mamba" else "KV heads"

"""One layer in one step: its spec, its pages, and where the step's tokens stand in its group.

Flow:    StepCache -> [LayerStep] -> attend_kv, attend_latent, update_states, ... -> output, pages of the layer
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from kvjax.core.spec import KVCacheSpec
from kvjax.device.inputs.batch import Array, DeviceBatch, DeviceGroup
from kvjax.device.layers.attention_options import AttentionOptions
from kvjax.device.mesh.placement import Placement
from kvjax.device.pages.kv_pages import Column
from pallas_kernels.slab_pages import is_in_slabs

# block_tables int32[S, P], seq_lens int32[S], query_start_loc int32[S + 1], distribution int32[3]
StepTables: TypeAlias = tuple[Array, Array, Array, Array]
Schedule = TypeVar("Schedule")


@dataclass(frozen=True)
class LayerStep:
    """What a way of attending gets. Made inside the traced step, once per call of a layer."""

    name: str
    spec: KVCacheSpec
    place: tuple[int, int]  # pool and column of its pages; layers of other groups may have the same
    pages: Column
    page_specs: Any  # of each of them
    page_size: int  # entries of a page, on all devices that share them
    batch: DeviceBatch
    group: DeviceGroup
    placement: Placement
    backend: str
    schedules: dict[Hashable, Any]  # of the layer's group in this step

    @property
    def tables(self) -> StepTables:
        """Whose tokens are new, and where all of them lie: the arguments that every attention op takes.

        Learned sinks stand before the tokens of every request.
        """
        block_tables, seq_lens = jnp.asarray(self.group.block_tables), jnp.asarray(self.group.seq_lens)
        if self.group.reserved_blocks is not None:
            first = jnp.broadcast_to(self.group.reserved_blocks, (block_tables.shape[0], self.num_reserved_blocks))
            block_tables = jnp.concatenate([first, block_tables], axis=1)
            seq_lens = jnp.where(seq_lens > 0, seq_lens + self.num_reserved_blocks * self.page_size, 0)
        return (block_tables, seq_lens, self.batch.query_start_loc, self.batch.distribution)

    def planned(self, kind: Hashable, make: Callable[[], Schedule]) -> Schedule:
        """What `make` gives to the first layer of the group that asks for `kind`: a step is planned once for all."""
        if kind not in self.schedules:
            self.schedules[kind] = make()
        schedule: Schedule = self.schedules[kind]
        return schedule

    @property
    def plans_for_all(self) -> bool:
        """Whether a plan of the step's tables is that of every device: not where each attends to some of them."""
        return self.placement.num_context == self.placement.num_data == 1

    def shards_of(self, pages: Column) -> tuple[Any, ...]:
        """Shapes of a device's part of K and V pages."""
        if is_in_slabs(pages):
            return pages
        num_shards = self.placement.num_shards
        return tuple(
            jax.ShapeDtypeStruct((*array.shape[:2], array.shape[2] // num_shards, *array.shape[3:]), array.dtype)
            for array in pages
        )

    @property
    def num_reserved_blocks(self) -> int:
        """Pages of learned sinks before the pages of a request."""
        reserved = self.group.reserved_blocks
        return 0 if reserved is None else reserved.shape[0]

    @property
    def entry_tables(self) -> StepTables:
        """As `tables`, of a layer with entries of several tokens: lengths are those of tokens."""
        assert self.group.compressed is not None  # its spec says so
        return (
            self.group.block_tables,
            self.group.compressed.seq_lens,
            self.batch.query_start_loc,
            self.batch.distribution,
        )

    def per_device(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`function` run once per device of the placement on its parts of the arrays."""
        return self.placement.shard_map(function, in_specs, out_specs)

    @property
    def by_rank(self) -> PartitionSpec:
        """How tables and slots are split, which data ranks have one after another."""
        return self.placement.by_rank

    def heads(self, rank: int, head_dim: int) -> PartitionSpec:
        """How an array of the step's tokens is split: it has `rank` dimensions, with heads in dimension `head_dim`."""
        return self.placement.token_spec(rank, head_dim)

    def per_head(self, x: jax.Array | None) -> PartitionSpec | None:
        """How an optional scalar, or an array of one number a head, is split."""
        if x is None:
            return None
        return PartitionSpec() if x.ndim == 0 else self.placement.head_spec(1, 0)

    def check_no_context(self, what: str) -> None:
        """Raises NotImplementedError where context ranks share the tokens of a page, of which `what` cannot do."""
        if self.placement.num_context > 1:
            raise NotImplementedError(
                f"layer {self.name!r}: {what} do not work where {self.placement.num_context} context ranks share the "
                f"tokens of a page; expected one"
            )

    def check_query_heads(self, num_heads: int) -> None:
        """Raises ValueError where query heads of a layer without KV heads do not split over the devices."""
        num_shards = self.placement.num_shards
        if num_heads % num_shards:
            raise ValueError(
                f"layer {self.name!r}: expected query heads that split over {num_shards} devices, got {num_heads}"
            )

    def check_visible(self, options: AttentionOptions) -> None:
        """Raises ValueError where a query would see tokens whose blocks the layer's group frees."""
        kept = {name: getattr(self.spec, name) for name in self.spec.kept_fields}
        window, chunk = kept.get("sliding_window", kept.get("rswa_window")), kept.get("attention_chunk_size")
        if window is not None and (options.sliding_window is None or options.sliding_window > window):
            raise ValueError(
                f"layer {self.name!r}: keeps a window of {window} tokens, asked for {options.sliding_window}"
            )
        if chunk is not None and (options.attention_chunk_size is None or chunk % options.attention_chunk_size):
            raise ValueError(
                f"layer {self.name!r}: keeps chunks of {chunk} tokens, asked for {options.attention_chunk_size}"
            )
        if options.sees_prompt and "rswa_window" not in kept:
            raise ValueError(
                f"layer {self.name!r}: expected a cache of R-SWA, which keeps prompts, with sees_prompt=True, got "
                f"{self.spec.kind}"
            )
        first = kept.get("num_sink_tokens", 0)
        if kept and options.num_sink_tokens > first:
            raise ValueError(
                f"layer {self.name!r}: keeps the first {first} tokens, asked for {options.num_sink_tokens}"
            )


WHOLE = PartitionSpec()  # the same on every device

__all__ = ["WHOLE", "LayerStep", "StepTables"]

"""The cache as a model sees it: one call per attention layer writes its K and V into pages and attends over them.

Flow:    KVPages + DeviceBatch inside a traced step -> [PagedKVCache] -> attention outputs, and the updated KVPages
Source:  the layer's group and column come from KVCacheConfig.layer_index

    cache = PagedKVCache(pages, batch, kv_cache_config)
    hidden = model(batch.token_ids, batch.positions, cache)      # each layer: cache("layers.3", q, k, v, options)
                                                                 # recurrent ones: cache.update_states("layers.4", ...)
    pages = cache.pages
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from kvjax.core.spec import AttentionSpec, KVCacheConfig, KVCacheSpec
from kvjax.device.attention_options import AttentionOptions
from kvjax.device.batch import Array, DeviceBatch
from kvjax.device.pages import Column, KVPages
from kvjax.device.placement import Placement
from pallas_kernels.ragged_paged_attention import ragged_paged_attention


class RecurrentStep(NamedTuple):
    """Where the step's tokens stand and which states they continue, in the order of the ops of `ssm_update`."""

    query_start_loc: Array  # int32[S + 1]
    distribution: Array  # int32[3]
    state_read: Array  # int32[S]
    state_write: Array  # int32[S]
    has_initial_state: Array  # bool[S]


# (arrays of the layer's states, step, *inputs) -> (output [T, heads, ...], the arrays with the step's states written)
StateUpdate: TypeAlias = Callable[..., tuple[jax.Array, Column]]


class PagedKVCache:
    """Pages and tables of one step. Made inside the traced function, used once per layer, thrown away with the trace.

    On a placement of several devices each attends with, and updates the states of, its own heads (`jax.shard_map`).
    """

    def __init__(
        self,
        pages: KVPages,
        batch: DeviceBatch,
        kv_cache_config: KVCacheConfig,
        placement: Placement | None = None,
        *,
        backend: str = "auto",
    ) -> None:
        self.pages = pages
        self._batch = jax.tree.map(jnp.asarray, batch)
        self._config = kv_cache_config
        self._placement = placement
        self._backend = backend
        self._attended: set[str] = set()
        self._updated: dict[str, set[int]] = {}  # recurrent layer -> arrays of its states that are those of this step
        self._owners = dict(kv_cache_config.shared_layers)  # layer without pages of its own -> the layer it reads

    @property
    def unused_layers(self) -> tuple[str, ...]:
        """Layers of the config that have not attended yet; empty after a whole forward pass."""
        return tuple(name for name in self._config.layer_index if name not in self._attended)

    def __call__(
        self,
        layer_name: str,
        q: jax.Array,  # [T, num_q_heads, head_dim]
        k: jax.Array | None,  # [T, num_kv_heads, head_dim]; None: the layer reads another's pages
        v: jax.Array | None,  # [T, num_kv_heads, head_dim_v], likewise
        options: AttentionOptions,
    ) -> jax.Array:  # [T, num_q_heads, head_dim_v]
        """Writes the layer's K and V of this step, then attends over all that its requests have in the cache.

        A layer of `shared_layers` comes without K and V, after the layer whose pages it reads.

        Raises:
            ValueError: the layer is unknown or attended before, shapes are not its spec's, the options look further
                back than its group keeps, or K and V are missing, or given for a layer that shares another's.
        """
        group_id, column = self._place(layer_name)
        group = self._config.kv_cache_groups[group_id]
        self._check_sharing(layer_name, k, v)
        spec = _check_layer(layer_name, group.spec_of(column), q, k, v, options)
        column_pages = self.pages.column(group.pool_id, column)
        out, arrays = self._attend(group_id, spec.num_kv_heads, q, k, v, column_pages, options)
        self._attended.add(layer_name)
        self.pages = self.pages.with_column(group.pool_id, column, arrays)
        return out

    def update_states(
        self,
        layer_name: str,
        update: StateUpdate,
        inputs: Sequence[jax.Array] = (),
        head_dims: Sequence[int | None] = (),
        *,
        arrays: Sequence[int] | None = None,
    ) -> jax.Array:
        """What `update` computes for a recurrent layer from the states of its requests, whose pages it writes.

        `update(states, step, *inputs)` gets those of the layer's arrays of states that `arrays` numbers (None: all) and
        gives (output [T, heads or channels, ...], the arrays); `step` are the last arguments of the ops of
        `pallas_kernels.ssm_update`. Each array is updated once a step.

        On a placement of several devices `update` runs once per device, on the states of its heads or channels and on
        its part of each input: `head_dims` gives the dimension of each that is split with them, None where every device
        gets it whole. The output is split in dimension 1. What needs all channels stands between two calls, one for
        the convolution and one for the scan, and XLA moves it: the projection of Mamba 1 to dt, b and c, the cut of
        Mamba 2's channels into x, b and c. States that do not split by their first dimension must be whole on every
        device (`axis_names={"kv_head": None}`); then all devices do the same.

        Raises:
            ValueError: the layer or array is unknown or ran before, there is not a head dimension for each input, or
                the arrays that come back are of other shapes or dtypes.
            NotImplementedError: the layer has no states.
        """
        group_id, column = self._place(layer_name)
        group, states = self._config.kv_cache_groups[group_id], self._batch.groups[group_id].states
        if states is None:
            raise NotImplementedError(
                f"layer {layer_name!r}: expected a cache of states, got {group.kv_cache_spec.kind}"
            )
        if len(inputs) != len(head_dims):
            raise ValueError(
                f"layer {layer_name!r}: expected a head dimension or None for each of {len(inputs)} inputs, "
                f"got {len(head_dims)}"
            )
        pages = list(self.pages.column(group.pool_id, column))
        chosen = self._arrays_to_update(layer_name, len(pages), arrays)
        batch, before = self._batch, tuple(pages[i] for i in chosen)
        step = RecurrentStep(batch.query_start_loc, batch.distribution, states.read, states.write, states.has_initial)

        def checked(states: Column, step: RecurrentStep, inputs: Sequence[jax.Array]) -> tuple[jax.Array, Column]:
            out, after = update(states, step, *inputs)
            wanted, got = ([(x.shape, x.dtype) for x in states], [(x.shape, x.dtype) for x in after])
            if got != wanted:
                raise ValueError(f"layer {layer_name!r}: expected states {wanted} back, got {got}")
            return out, tuple(after)

        out, after = self._per_device(checked, head_dims, len(chosen))(before, step, tuple(inputs))
        for i, array in zip(chosen, after, strict=True):
            pages[i] = array
        self._updated.setdefault(layer_name, set()).update(chosen)
        if len(self._updated[layer_name]) == len(pages):
            self._attended.add(layer_name)
        self.pages = self.pages.with_column(group.pool_id, column, tuple(pages))
        return out

    def _arrays_to_update(self, layer_name: str, count: int, arrays: Sequence[int] | None) -> tuple[int, ...]:
        """Those of a layer's `count` arrays of states that a call updates."""
        chosen = tuple(range(count)) if arrays is None else tuple(arrays)
        if not chosen or len(set(chosen)) != len(chosen) or not set(chosen) <= set(range(count)):
            raise ValueError(f"layer {layer_name!r}: expected distinct arrays out of {count}, got {chosen}")
        again = sorted(self._updated.get(layer_name, set()) & set(chosen))
        if again:
            raise ValueError(f"layer {layer_name!r} updates arrays {again} of its states twice in one step")
        return chosen

    def _per_device(
        self, update: Callable[..., Any], head_dims: Sequence[int | None], num_arrays: int
    ) -> Callable[..., Any]:
        """`update(states, step, inputs)` on each device's part of them."""
        placement = self._placement
        if placement is None:
            return update
        heads = placement.head_spec(2, 1)
        states = (heads,) * num_arrays
        inputs = tuple(PartitionSpec() if dim is None else placement.head_spec(dim + 1, dim) for dim in head_dims)
        return placement.shard_map(update, (states, PartitionSpec(), inputs), (heads, states))

    def _place(self, layer_name: str) -> tuple[int, int]:
        """(group, column) of a layer that runs now."""
        if layer_name not in self._config.layer_index:
            raise ValueError(f"expected a layer out of {tuple(self._config.layer_index)}, got {layer_name!r}")
        if layer_name in self._attended:
            raise ValueError(f"layer {layer_name!r} attends twice in one step")
        return self._config.layer_index[layer_name]

    def _check_sharing(self, layer_name: str, k: jax.Array | None, v: jax.Array | None) -> None:
        owner = self._owners.get(layer_name)
        if owner is not None and owner not in self._attended:
            raise ValueError(f"layer {layer_name!r} reads what {owner!r} writes; expected that layer to attend first")
        if owner is not None and (k is not None or v is not None):
            raise ValueError(f"layer {layer_name!r} reads the pages of {owner!r}; expected no K and V")
        if owner is None and (k is None or v is None):
            raise ValueError(f"layer {layer_name!r}: expected K and V, got none; only shared_layers have none")

    def _attend(
        self,
        group_id: int,
        num_kv_heads: int,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        pages: Column,
        options: AttentionOptions,
    ) -> tuple[jax.Array, Column]:
        batch, group = self._batch, self._batch.groups[group_id]
        per_head = {"sinks": options.sinks, "k_scale": options.k_scale, "v_scale": options.v_scale}
        tables = (group.block_tables, group.seq_lens, batch.query_start_loc, batch.distribution, group.slot_mapping)
        placement = self._placement
        num_shards = 1 if placement is None else placement.num_shards

        def attend(q, k, v, pages, per_head, tables):  # type: ignore[no-untyped-def]
            block_tables, seq_lens, query_start_loc, distribution, slot_mapping = tables
            result = ragged_paged_attention(
                q,
                pages,
                block_tables,
                seq_lens,
                query_start_loc,
                distribution,
                new_kv=None if k is None else (k, v),
                slot_mapping=None if k is None else slot_mapping,
                sm_scale=options.sm_scale,
                sliding_window=options.sliding_window,
                attention_chunk_size=options.attention_chunk_size,
                num_sink_tokens=options.num_sink_tokens,
                soft_cap=options.soft_cap,
                num_kv_heads=num_kv_heads // num_shards,
                backend=self._backend,
                **per_head,
            )
            return result.out, result.pages

        if placement is None:
            return attend(q, k, v, pages, per_head, tables)
        heads = placement.head_spec(3, 1)
        page_specs = tuple(placement.head_spec(array.ndim, 2) for array in pages)
        per_head_specs = {name: _per_head_spec(placement, x) for name, x in per_head.items()}
        in_specs = (heads, heads, heads, page_specs, per_head_specs, PartitionSpec())
        return placement.shard_map(attend, in_specs, (heads, page_specs))(q, k, v, pages, per_head, tables)


def _per_head_spec(placement: Placement, x: jax.Array | None) -> PartitionSpec | None:
    """Spec of an optional scalar or per-head array."""
    if x is None:
        return None
    return PartitionSpec() if x.ndim == 0 else placement.head_spec(1, 0)


def _check_layer(
    name: str, spec: KVCacheSpec, q: jax.Array, k: jax.Array | None, v: jax.Array | None, options: AttentionOptions
) -> AttentionSpec:
    """The layer's spec, which is one of K and V."""
    if not isinstance(spec, AttentionSpec):
        raise NotImplementedError(f"layer {name!r}: expected a cache of K and V, got {spec.kind}")
    dims_v = spec.head_size if spec.head_size_v is None else spec.head_size_v
    wanted = ((spec.num_kv_heads, spec.head_size), (spec.num_kv_heads, dims_v))
    if k is not None and v is not None and (k.shape[1:], v.shape[1:]) != wanted:
        raise ValueError(f"layer {name!r}: expected K and V of {wanted} a token, got {k.shape[1:]} and {v.shape[1:]}")
    if q.shape[1] % spec.num_kv_heads or q.shape[2] != spec.head_size:
        raise ValueError(
            f"layer {name!r}: expected queries of {spec.num_kv_heads} * n heads of {spec.head_size}, got {q.shape[1:]}"
        )
    kept = getattr(spec, "sliding_window", None) if spec.kind == "sliding_window" else None
    if kept is not None and (options.sliding_window is None or options.sliding_window > kept):
        raise ValueError(f"layer {name!r}: keeps a window of {kept} tokens, asked for {options.sliding_window}")
    return spec

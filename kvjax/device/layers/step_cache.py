"""The cache as a model sees it: one method per idea of attention, each called once by a layer in a step.

Flow:    KVPages + DeviceBatch inside a traced step -> [StepCache] -> attention outputs, and the updated KVPages
Source:  the layer's group and column come from KVCacheConfig.layer_index

    cache = StepCache(pages, batch, kv_cache_config)
    hidden = model(batch.token_ids, batch.positions, cache)
    pages = cache.pages

    a layer calls                                              where its pages hold
    cache("layers.3", q, k, v, options)                        K and V per head
    cache.attend_latent("layers.3", q_nope, q_pe, ...)         a latent per token
    cache.pick_tokens("layers.3.indexer", q, weights, ...)     an indexer's key per token
    cache.attend_cross("layers.3", q, options)                 K and V per head of an encoder's tokens
    cache.update_states("layers.3", update, inputs, ...)       recurrent states
    cache.compress("layers.3.compressed", kv, scores, ...)     entries of several tokens, and the states to make them
    cache.pick_entries("layers.3.indexer", q, weights, topk)   entries of several tokens, an indexer's keys
    cache.attend_compressed("layers.3.window", q, kv, ...)     a latent per token, beside entries of several tokens
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.core.kinds.ring_state import RingStateSpec
from kvjax.core.spec import KVCacheConfig
from kvjax.device.inputs.batch import DeviceBatch
from kvjax.device.layers.attention_options import AttentionOptions
from kvjax.device.layers.compressed_attention import attend_compressed, check_window, pick_entries, pick_tokens
from kvjax.device.layers.cross_attention import attend_cross
from kvjax.device.layers.entry_compressor import FinishEntries, check_entries, make_entries, write_entries
from kvjax.device.layers.kv_attention import attend_kv, write_kv
from kvjax.device.layers.latent_attention import attend_latent, attend_picked
from kvjax.device.layers.layer_step import LayerStep
from kvjax.device.layers.ring_states import RingSizes
from kvjax.device.layers.state_update import RecurrentStep, StateUpdate, check_states, update_states
from kvjax.device.layers.wanted_rows import of_wanted, wanted_rows
from kvjax.device.mesh.placement import Placement
from kvjax.device.pages.kv_pages import Column, KVPages
from kvjax.device.programs.layer_marks import mark_pages


class StepCache:
    """Pages and tables of one step. Made inside the traced function, used once per layer, thrown away with the trace.

    On a placement of several devices each attends with, and updates the states of, its own heads (`jax.shard_map`).

    Layers of several groups may have pages in one array. Most layers write what depends on all that was read before
    them. Where one does not, a barrier lets the write wait for the read: XLA would keep a copy for the read instead.
    """

    def __init__(
        self,
        pages: KVPages,
        batch: DeviceBatch,
        kv_cache_config: KVCacheConfig,
        placement: Placement | None = None,
        *,
        narrows: bool = False,
        backend: str = "auto",
    ) -> None:
        """The cache of one step.

        Args:
            pages: the pages of all pools, as they are before the step.
            batch: the step's padded inputs.
            kv_cache_config: pools and groups.
            placement: the mesh and its axes; None: the default device.
            narrows: whether the caller takes hidden states of the `wanted` tokens alone.
            backend: of the ops of pallas_kernels.
        """
        self.pages = pages
        self._batch = jax.tree.map(jnp.asarray, batch)
        self._config = kv_cache_config
        self._placement = Placement.create() if placement is None else placement
        self._backend = backend
        self.wanted: jax.Array | None = None  # int32[N] fewer than T tokens whose hidden states are of use; None: all
        if narrows and self._placement.num_data == self._placement.num_context == 1:
            self.wanted = wanted_rows(self._batch)
        self._attended: set[str] = set()
        self._updated: dict[str, set[int]] = {}  # recurrent layer -> arrays of its states that are those of this step
        self._owners = dict(kv_cache_config.shared_layers)  # layer without pages of its own -> the layer it reads
        self._compressed: set[str] = set()  # layers whose entries of this step are written
        self._schedules: dict[int, dict[Hashable, Any]] = {}  # group -> what its layers share in the step

    @property
    def backend(self) -> str:
        """What updates of states pass to the ops of pallas_kernels."""
        return self._backend

    @property
    def unused_layers(self) -> tuple[str, ...]:
        """Layers of the config that have not attended yet; empty after a whole forward pass."""
        return tuple(name for name in self._config.layer_index if name not in self._attended)

    def __call__(
        self,
        layer_name: str,
        q: jax.Array,  # [T, num_q_heads, head_dim], or [N, ...] of the `wanted` tokens, where there are any
        k: jax.Array | None,  # [T, num_kv_heads, head_dim]; None: the layer reads another's pages
        v: jax.Array | None,  # [T, num_kv_heads, head_dim_v], likewise
        options: AttentionOptions,
    ) -> jax.Array:  # [T, num_q_heads, head_dim_v], or [N, ...]
        """Writes the layer's K and V of this step, then attends over all that its requests have in the cache.

        A layer of `shared_layers` comes without K and V, after the layer whose pages it reads. In its last layer a
        model may ask for the `wanted` tokens alone, and give no other hidden states.

        Raises:
            ValueError: the layer is unknown or attended before, shapes are not its spec's, the options look further
                back than its group keeps, or K and V are missing, or given for a layer that shares another's.
            NotImplementedError: the layer's pages do not hold K and V.
        """
        layer = self._layer(layer_name)
        self._check_writes(layer_name, "K and V", k, v)
        if self.wanted is not None and q.shape[0] == self.wanted.shape[0]:
            if k is not None and v is not None:
                layer = replace(layer, pages=write_kv(layer, k, v, options))
            layer, k, v = of_wanted(layer, self.wanted), None, None
        return self._ran(layer_name, *attend_kv(layer, q, k, v, options))

    def mark_layer(self) -> None:
        """A model says so before each of its layers, and once behind the last: there its step may be cut."""
        leaves, structure = jax.tree.flatten(self.pages)
        self.pages = jax.tree.unflatten(structure, mark_pages(leaves))

    def attend_latent(
        self,
        layer_name: str,
        q_nope: jax.Array,  # [T, num_q_heads, latent_dim] queries times the key projection of their head
        q_pe: jax.Array,  # [T, num_q_heads, rope_dim] rotated
        latent: jax.Array | None,  # [T, latent_dim] normed; None: the layer reads another's pages
        key_pe: jax.Array | None,  # [T, rope_dim] rotated; None likewise
        options: AttentionOptions,
        picks: jax.Array | None = None,  # int32[T, K] of `pick_tokens`, the tokens that each sees; None: all before it
    ) -> jax.Array:  # [T, num_q_heads, latent_dim], to be multiplied by the value projection
        """Writes the layer's latents of this step, then attends over all that its requests have (MLA, absorbed).

        A layer of `shared_layers` comes without latents. On a mesh query heads are split, latents are whole.

        Raises:
            ValueError: as of a call with K and V; or the options have `v_scale`: a latent is key and value; or with
                `picks` more than `sm_scale`.
            NotImplementedError: the layer's pages do not hold a latent for every token; or there are `picks`, and
                context ranks share the tokens.
        """
        layer = self._layer(layer_name)
        self._check_writes(layer_name, "latents", latent, key_pe)
        if picks is not None:
            return self._ran(layer_name, *attend_picked(layer, q_nope, q_pe, latent, key_pe, options, picks))
        return self._ran(layer_name, *attend_latent(layer, q_nope, q_pe, latent, key_pe, options))

    def pick_tokens(
        self,
        layer_name: str,  # of the indexer
        q: jax.Array,  # [T, num_index_heads, index_dim]
        weights: jax.Array,  # [T, num_index_heads]
        keys: jax.Array,  # [T, index_dim]
        topk: int,
    ) -> jax.Array:  # int32[T, topk] -1: none
        """Writes the indexer's keys of this step; then the tokens up to each of the highest scores.

        A score is `sum over heads of weight * relu(q . key)`. On a mesh everything is whole.

        Raises:
            ValueError: the layer is unknown or ran before, or shapes are not its spec's.
            NotImplementedError: its pages do not hold a key for every token, or context ranks share the tokens.
        """
        picked, pages = pick_tokens(self._layer(layer_name), q, weights, keys, topk)
        return self._ran(layer_name, *jax.lax.optimization_barrier((picked, pages)))

    def compress(
        self,
        layer_name: str,  # of the entries
        kv: jax.Array,  # [T, coff * dim]
        scores: jax.Array,  # [T, coff * dim]
        position_bias: jax.Array,  # float32[tokens of an entry, coff * dim] added to the scores of its tokens
        finish: FinishEntries,
        *,
        states: str,  # the layer of the compressor's states
    ) -> None:
        """Writes the compressor's states of this step, and the entries that they complete (DeepSeek V4).

        `finish(entries, positions)` norms and rotates new entries float32[N, dim], the first token of each at
        `positions` int32[N], -1 in padding, whose entries are not written. Every layer of entries is compressed
        before it is picked from or attended to.

        Raises:
            ValueError: a layer is unknown or ran before, or shapes are not those of both specs.
            NotImplementedError: the pages of `layer_name` do not hold latents.
        """
        entry_layer, state_layer = self._layer(layer_name), self._layer(states)
        if layer_name in self._compressed:
            raise ValueError(f"layer {layer_name!r} is compressed twice in one step")
        made = jax.lax.optimization_barrier(make_entries(entry_layer, state_layer, kv, scores, position_bias))
        vectors = finish(made.entries, made.positions)
        check_entries(entry_layer, made, vectors)
        self._store(states, made.pages)
        self._store(layer_name, write_entries(self._layer(layer_name), vectors))
        self._compressed.add(layer_name)
        self._attended.add(states)

    def pick_entries(
        self,
        layer_name: str,
        q: jax.Array,  # [T, num_index_heads, index_dim]
        weights: jax.Array,  # [T, num_index_heads]
        topk: int,
    ) -> jax.Array:  # int32[T, topk] -1: none
        """For each token the entries of the highest scores `sum over heads of weight * relu(q . key)` before it.

        Raises:
            ValueError: the layer is unknown, not compressed yet or picked from before, or shapes are not its spec's.
            NotImplementedError: the layer's pages do not hold entries of several tokens.
        """
        layer = self._entries(layer_name)
        picked = pick_entries(layer, q, weights, topk)
        return self._ran(layer_name, *jax.lax.optimization_barrier((picked, layer.pages)))

    def attend_compressed(
        self,
        layer_name: str,  # of the window
        q: jax.Array,  # [T, num_q_heads, dim]
        kv: jax.Array,  # [T, dim] latents of the step, keys and values of all heads
        options: AttentionOptions,  # sm_scale, sliding_window and sinks
        indices: jax.Array | None = None,  # int32[T, K] entries that a token sees, -1: none; None: all before it
        *,
        compressed: str | None = None,  # the layer of the entries; None: the window alone
    ) -> jax.Array:  # [T, num_q_heads, dim]
        """Writes the latents of this step, then attends over their window and the entries in one softmax.

        On a mesh query heads are split, everything else is whole.

        Raises:
            ValueError: a layer is unknown or ran before, the entries are not compressed yet, shapes are not those of
                both specs, or the options look further back than the window's group keeps or have more than the above.
            NotImplementedError: the layers' pages do not hold latents, or entries of several tokens.
        """
        window = self._layer(layer_name)
        check_window(window, q, options)
        entries = None if compressed is None else self._entries(compressed)
        out, pages = attend_compressed(window, entries, q, kv, options, indices)
        if compressed is not None:
            self._attended.add(compressed)
        return self._ran(layer_name, out, pages)

    def attend_cross(
        self,
        layer_name: str,
        q: jax.Array,  # [T, num_q_heads, head_dim]
        options: AttentionOptions,
    ) -> jax.Array:  # [T, num_q_heads, head_dim_v]
        """Attends over all encoder tokens of each request, which the encoder's program has written (`EncoderCache`).

        Raises:
            ValueError: the layer is unknown or attended before, queries are not of its heads, or the options have a
                mask.
            NotImplementedError: the layer's pages do not hold an encoder's K and V.
        """
        layer = self._layer(layer_name)
        return self._ran(layer_name, attend_cross(layer, q, options), layer.pages)

    def ring_sizes(self, layer_name: str) -> RingSizes | None:
        """Those of a recurrent layer whose pages have rings (`RingStateSpec`); None: they are states alone."""
        spec = self._layer(layer_name).spec
        if not isinstance(spec, RingStateSpec):
            return None
        return RingSizes(spec.ring_tokens, 1 + spec.num_ring_drafts, all_short=self._batch.is_decode)

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
        its part of each input. `head_dims` gives the dimension of each input that is split with them, None where every
        device gets it whole. An input split in dimension 0 is a weight, all others have the step's tokens there, which
        data ranks split. The output is split in dimension 1. What needs all channels stands between two calls, one for
        the convolution and one for the scan, and XLA moves it. That is the projection of Mamba 1 to dt, b and c, or the
        cut of Mamba 2's channels into x, b and c. States that do not split by their first dimension must be whole on
        every device (`axis_names={"kv_head": None}`); then all devices do the same.

        Raises:
            ValueError: the layer or array is unknown or ran before, there is not a head dimension for each input, or
                the arrays that come back are of other shapes or dtypes.
            NotImplementedError: the layer has no states.
        """
        layer = self._layer(layer_name)
        check_states(layer, inputs, head_dims)
        chosen = self._arrays_to_update(layer_name, len(layer.pages), arrays)
        out, pages = update_states(layer, update, inputs, head_dims, chosen)
        updated = self._updated.setdefault(layer_name, set())
        updated.update(chosen)
        if len(updated) < len(pages):
            self._store(layer_name, pages)
            return out
        return self._ran(layer_name, out, pages)

    def _arrays_to_update(self, layer_name: str, count: int, arrays: Sequence[int] | None) -> tuple[int, ...]:
        """The places of the arrays that a call updates among a layer's `count` arrays of states."""
        chosen = tuple(range(count)) if arrays is None else tuple(arrays)
        if not chosen or len(set(chosen)) != len(chosen) or not set(chosen) <= set(range(count)):
            raise ValueError(f"layer {layer_name!r}: expected distinct arrays out of {count}, got {chosen}")
        again = sorted(self._updated.get(layer_name, set()) & set(chosen))
        if again:
            raise ValueError(f"layer {layer_name!r} updates arrays {again} of its states twice in one step")
        return chosen

    def _layer(self, layer_name: str) -> LayerStep:
        """A layer that runs now."""
        if layer_name not in self._config.layer_index:
            raise ValueError(f"expected a layer out of {tuple(self._config.layer_index)}, got {layer_name!r}")
        if layer_name in self._attended:
            raise ValueError(f"layer {layer_name!r} attends twice in one step")
        group_id, column = self._config.layer_index[layer_name]
        group = self._config.kv_cache_groups[group_id]
        layout = self._config.pools[group.pool_id].columns[column]
        return LayerStep(
            name=layer_name,
            spec=group.spec_of(column),
            place=(group.pool_id, column),
            pages=self.pages.column(group.pool_id, column),
            page_specs=self.pages.specs(group.pool_id, column),
            page_size=layout.page_size,
            batch=self._batch,
            group=self._batch.groups[group_id],
            placement=self._placement,
            backend=self._backend,
            schedules=self._schedules.setdefault(group_id, {}),
        )

    def _check_writes(self, layer_name: str, what: str, *new: jax.Array | None) -> None:
        """Raises ValueError unless a layer has all it writes, or nothing where it reads what another has written."""
        owner, missing = self._owners.get(layer_name), [x is None for x in new]
        if owner is not None and owner not in self._attended:
            raise ValueError(f"layer {layer_name!r} reads what {owner!r} writes; expected that layer to attend first")
        if owner is not None and not all(missing):
            raise ValueError(f"layer {layer_name!r} reads the pages of {owner!r}; expected no {what}")
        if owner is None and any(missing):
            raise ValueError(f"layer {layer_name!r}: expected {what}, got none; only shared_layers have none")

    def _entries(self, layer_name: str) -> LayerStep:
        """A layer of entries that are read now."""
        layer = self._layer(layer_name)
        if layer_name not in self._compressed:
            raise ValueError(
                f"layer {layer_name!r}: expected its entries of this step to be written; compress it first"
            )
        return layer

    def _ran(self, layer_name: str, out: jax.Array, pages: Column) -> jax.Array:
        """`out` of a layer that has done all it does in a step, and left these pages."""
        self._store(layer_name, pages)
        self._attended.add(layer_name)
        return out

    def _store(self, layer_name: str, pages: Column) -> None:
        group_id, column = self._config.layer_index[layer_name]
        self.pages = self.pages.with_column(self._config.kv_cache_groups[group_id].pool_id, column, pages)


__all__ = ["RecurrentStep", "StateUpdate", "StepCache"]

"""States of recurrent layers: what a layer computes from those of its requests, which it leaves in their pages.

Flow:    inputs of a layer + LayerStep -> [update_states] -> the update's output, the layer's arrays of states
Source:  pallas_kernels.ssm_update, pallas_kernels.gated_delta_rule: the order of their arguments
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from kvjax.core.kinds.ring_state import RingStateSpec
from kvjax.device.layers.layer_step import LayerStep
from kvjax.device.pages.kv_pages import Column
from pallas_kernels.slab_pages import is_in_slabs, replaced


class RecurrentStep(NamedTuple):
    """Where the step's tokens stand and which states they continue, in the order of the ops of `ssm_update`."""

    query_start_loc: jax.Array  # int32[S + 1]
    distribution: jax.Array  # int32[3]
    state_read: jax.Array  # int32[S]
    state_write: jax.Array  # int32[S], or int32[S, 1 + drafts]
    has_initial_state: jax.Array  # bool[S]
    checkpoint_ends: jax.Array | None = None  # int32[S, k]; None: no state is left on the way
    checkpoint_pages: jax.Array | None = None  # int32[S, k]


class StepOverRings(NamedTuple):
    """What updates of layers whose pages have rings get (`RingStateSpec`)."""

    step: RecurrentStep
    seq_lens: jax.Array  # int32[S] tokens of each request after the step


AnyStep: TypeAlias = RecurrentStep | StepOverRings
# (arrays of the layer's states, step, *inputs) -> (output [T, heads, ...], the arrays with the step's states written)
StateUpdate: TypeAlias = Callable[..., tuple[jax.Array, Column]]


def check_states(layer: LayerStep, inputs: Sequence[jax.Array], head_dims: Sequence[int | None]) -> None:
    """Raises NotImplementedError unless the layer has states, ValueError without a head dimension for each input."""
    if layer.group.states is None:
        raise NotImplementedError(f"layer {layer.name!r}: expected a cache of states, got {layer.spec.kind}")
    if len(inputs) != len(head_dims):
        raise ValueError(
            f"layer {layer.name!r}: expected a head dimension or None for each of {len(inputs)} inputs, "
            f"got {len(head_dims)}"
        )


def update_states(
    layer: LayerStep,
    update: StateUpdate,
    inputs: Sequence[jax.Array],
    head_dims: Sequence[int | None],
    arrays: Sequence[int],  # which of the layer's arrays the update gets
) -> tuple[jax.Array, Column]:
    """What `update` gives on each device's part of the states and inputs, and all arrays of the layer.

    Raises:
        ValueError: the arrays that come back are of other shapes or dtypes.
        NotImplementedError: several arrays at a time, which lie in slabs.
    """
    if is_in_slabs(layer.pages) and len(arrays) > 1:
        raise NotImplementedError(
            f"layer {layer.name!r}: states in slabs are updated an array at a time, got arrays {tuple(arrays)}; make a "
            "call for each, or plan with one_memory=False"
        )
    states, batch = layer.group.states, layer.batch
    assert states is not None  # `check_states` comes first
    arrays_of_step = (batch.query_start_loc, batch.distribution, states.read, states.write, states.has_initial)
    step = RecurrentStep(*map(jnp.asarray, arrays_of_step))
    if states.checkpoint_ends is not None and states.checkpoint_pages is not None:
        step = step._replace(
            checkpoint_ends=jnp.asarray(states.checkpoint_ends), checkpoint_pages=jnp.asarray(states.checkpoint_pages)
        )
    has_rings = isinstance(layer.spec, RingStateSpec)
    told = StepOverRings(step, jnp.asarray(layer.group.seq_lens)) if has_rings else step

    def checked(states: Column, step: AnyStep, inputs: Sequence[jax.Array]) -> tuple[jax.Array, Column]:
        out, after = update(states, step, *inputs)
        wanted, got = ([(x.shape, x.dtype) for x in states], [(x.shape, x.dtype) for x in after])
        if got != wanted:
            raise ValueError(f"layer {layer.name!r}: expected states {wanted} back, got {got}")
        return out, tuple(after)

    input_specs = tuple(map(partial(_input_spec, layer), head_dims))
    if is_in_slabs(layer.pages):
        return _update_in_slabs(layer, checked, told, inputs, input_specs, arrays[0])
    state_specs = tuple(layer.page_specs[i] for i in arrays)
    specs = (state_specs, layer.by_rank, input_specs)
    update_on_each = layer.per_device(checked, specs, (layer.heads(2, 1), state_specs))
    out, after = update_on_each(tuple(layer.pages[i] for i in arrays), told, tuple(inputs))
    pages = list(layer.pages)
    for i, array in zip(arrays, after, strict=True):
        pages[i] = array
    return out, tuple(pages)


def _update_in_slabs(
    layer: LayerStep,
    update: StateUpdate,
    step: AnyStep,
    inputs: Sequence[jax.Array],
    input_specs: tuple[PartitionSpec, ...],
    array: int,
) -> tuple[jax.Array, Column]:
    """What `update` gives of one array; on each device the whole column goes in and comes back."""

    def on_each(pages: Column, step: AnyStep, *inputs: jax.Array) -> tuple[jax.Array, Column]:
        out, (after,) = update((pages[array],), step, inputs)
        return out, replaced(pages, array, after)

    heads, page_specs = layer.heads(2, 1), layer.page_specs
    update_on_each = layer.per_device(on_each, (page_specs, layer.by_rank, *input_specs), (heads, page_specs))
    out, pages = update_on_each(layer.pages, step, *inputs)
    return out, pages


def _input_spec(layer: LayerStep, head_dim: int | None) -> PartitionSpec:
    """How an input is split in dimension `head_dim`: a weight if that is the first, else numbers of tokens."""
    if head_dim == 0:
        return layer.placement.head_spec(1, 0)
    return layer.by_rank if head_dim is None else layer.heads(head_dim + 1, head_dim)


__all__ = ["AnyStep", "RecurrentStep", "StateUpdate", "StepOverRings", "check_states", "update_states"]

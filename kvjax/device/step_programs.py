"""The compiled programs of a step: arrays in, arrays out, with as few of them as a call can have.

Flow:    weights, KVPages, DeviceBatch, sampling inputs -> [StepPrograms] -> KVPages, what else the step leaves
Source:  ARCHITECTURE.md, "Buckets"

A call costs the host by its arrays and by the nodes of its trees, so weights and pages are flat tuples and all small
numpy inputs one buffer (`PackedInputs`). There is a program for each layout of the inputs, so for each bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax

from kvjax.core.spec import KVCacheConfig
from kvjax.device.batch import DeviceBatch
from kvjax.device.packed_inputs import PackedInputs, Shapes, shapes_of
from kvjax.device.pages import KVPages, page_shardings
from kvjax.device.placement import Placement

# (weights, pages, batch, sampling inputs, previous tokens, embeds, sampler state) -> (pages, what else the step leaves)
Update: TypeAlias = Callable[..., tuple[KVPages, Any]]


class StepPrograms:
    """The programs of one update function. Owned by one `UpdateStep`; a call costs one dispatch."""

    def __init__(self, update: Update, kv_cache_config: KVCacheConfig, placement: Placement) -> None:
        self._update = update
        self._replicated = placement.replicated
        shardings = page_shardings(kv_cache_config, placement)
        self._page_shardings: tuple[Any, ...] = tuple(jax.tree.leaves(shardings))
        self._page_tree = jax.tree.structure(shardings)
        self.by_shapes: dict[Shapes, _Program] = {}

    @property
    def num_compiled(self) -> int:
        """Programs compiled so far: one per layout of inputs that ran."""
        return sum(program.num_compiled for program in self.by_shapes.values())

    def __call__(
        self,
        weights: tuple[jax.Array, ...],
        pages: KVPages,
        batch: DeviceBatch,
        sampling: Any,  # pytree of numpy arrays
        previous: jax.Array,
        embeds: jax.Array | None,
        sampler_state: Any,  # pytree of arrays on the device
    ) -> tuple[KVPages, Any]:
        """Dispatches a step. `pages` is donated; batch and sampling are copied, but for large arrays."""
        leaves, shapes = shapes_of((batch, sampling))
        program = self._program(shapes)
        packed = program.inputs.pack(leaves)
        page_arrays, rest = program.run(weights, jax.tree.leaves(pages), *packed, previous, embeds, sampler_state)
        return jax.tree.unflatten(self._page_tree, page_arrays), rest

    def compiled(
        self,
        weights: tuple[jax.Array, ...],
        pages: KVPages,
        batch: DeviceBatch,
        sampling: Any,
        previous: Any,
        embeds: Any,
        sampler_state: Any,
    ) -> jax.stages.Compiled:
        """The compiled module of a step like this one; arrays on devices may be ShapeDtypeStructs. Runs nothing."""
        leaves, shapes = shapes_of((batch, sampling))
        program = self._program(shapes)
        packed = program.inputs.pack(leaves)
        return program.run.lower(weights, jax.tree.leaves(pages), *packed, previous, embeds, sampler_state).compile()

    def _program(self, shapes: Shapes) -> _Program:
        found = self.by_shapes.get(shapes)
        if found is None:
            found = self.by_shapes[shapes] = _Program(self, PackedInputs(shapes))
        return found


class _Program:
    """The program of one layout of inputs."""

    def __init__(self, programs: StepPrograms, inputs: PackedInputs) -> None:
        self.inputs = inputs
        self._update = programs._update
        self._page_tree = programs._page_tree
        pages, replicated = list(programs._page_shardings), programs._replicated
        self.run = jax.jit(
            self._traced,
            donate_argnums=1,
            in_shardings=(None, pages, *(replicated,) * 5),
            out_shardings=(pages, replicated),
        )

    @property
    def num_compiled(self) -> int:
        return int(self.run._cache_size())  # type: ignore[attr-defined]

    def _traced(
        self,
        weights: tuple[jax.Array, ...],
        pages: list[jax.Array],
        buffer: jax.Array,
        own: tuple[jax.Array, ...],
        previous: jax.Array,
        embeds: jax.Array | None,
        sampler_state: Any,
    ) -> tuple[list[jax.Array], Any]:
        """The step as jax traces it, once."""
        batch, sampling = self.inputs.unpack(buffer, own)
        own_pages = jax.tree.unflatten(self._page_tree, pages)
        new_pages, rest = self._update(weights, own_pages, batch, sampling, previous, embeds, sampler_state)
        return jax.tree.leaves(new_pages), rest


__all__ = ["StepPrograms"]

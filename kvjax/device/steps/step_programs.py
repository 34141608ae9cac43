"""The compiled programs of a step: arrays in, arrays out, with as few of them as a call can have.

Flow:    weights, KVPages, DeviceBatch, sampling inputs -> [StepPrograms] -> KVPages, what else the step leaves
Source:  ARCHITECTURE.md, "Buckets"

A step over several devices is traced under their mesh, which a model may ask for (`jax.sharding.get_abstract_mesh`).

A call costs the host by its arrays and by the nodes of its trees, so weights and pages are flat tuples and all small
numpy inputs one buffer (`PackedInputs`). There is a program for each layout of the inputs, so for each bucket; of a
model with many layers alike it is a chain of programs (`cut_step`), each of which is compiled once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import jax

from kvjax.core.spec import KVCacheConfig
from kvjax.device.inputs.batch import DeviceBatch
from kvjax.device.inputs.packed_inputs import PackedInputs, Shapes, shapes_of
from kvjax.device.mesh.placement import Placement
from kvjax.device.mesh.transfers import hands_over
from kvjax.device.pages.kv_pages import KVPages, page_shardings
from kvjax.device.programs.compile_log import log_compiling
from kvjax.device.programs.step_chain import StepChain
from kvjax.device.programs.step_cuts import cut_step

# (weights, pages, batch, sampling inputs, previous tokens, embeds, sampler state, whether the last layer may differ
# from the others) -> (pages, what else the step leaves)
Update: TypeAlias = Callable[..., tuple[KVPages, Any]]
CompilerOptions: TypeAlias = Mapping[str, bool | int | float | str]  # XLA's, by name, as of `jax.jit`


class StepPrograms:
    """The programs of one update function. Owned by one `UpdateStep`; a call costs a dispatch, or one a piece."""

    def __init__(
        self,
        update: Update,
        kv_cache_config: KVCacheConfig,
        placement: Placement,
        *,
        may_cut: bool = True,
        compiler_options: CompilerOptions | None = None,
    ) -> None:
        """With `may_cut` steps of many layers alike are chains of programs."""
        self._compiler_options = None if compiler_options is None else dict(compiler_options)
        self.by_shapes: dict[Shapes, _Program] = {}
        self._update = update
        self._may_cut = may_cut
        self._replicated = placement.replicated
        shardings = page_shardings(kv_cache_config, placement)
        self._page_shardings: tuple[Any, ...] = tuple(jax.tree.leaves(shardings))
        self._page_tree = jax.tree.structure(shardings)

    @property
    def num_compiled(self) -> int:
        """Steps compiled so far: one per layout of inputs that ran."""
        return sum(program.num_compiled for program in self.by_shapes.values())

    @hands_over
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
        """Dispatches a step. `pages` is donated; what of batch and sampling can be written is copied."""
        leaves, shapes = shapes_of((batch, sampling))
        program = self._program(shapes, batch)
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
    ) -> tuple[jax.stages.Compiled, ...]:
        """The compiled modules of a step like this one; arrays on devices may be ShapeDtypeStructs. Runs nothing."""
        leaves, shapes = shapes_of((batch, sampling))
        program = self._program(shapes, batch)
        packed = program.inputs.pack(leaves)
        return program.compiled(weights, jax.tree.leaves(pages), *packed, previous, embeds, sampler_state)

    def _program(self, shapes: Shapes, batch: DeviceBatch) -> _Program:
        found = self.by_shapes.get(shapes)
        if found is None:
            inputs = PackedInputs(shapes)
            found = _Program(
                f"a step of {batch.token_ids.shape[-1]} tokens and {batch.query_start_loc.shape[-1] - 1} requests",
                self._traced(inputs, may_narrow=True),
                self._traced(inputs, may_narrow=False) if self._may_cut else None,
                inputs,
                self._page_shardings,
                self._replicated,
                self._compiler_options,
            )
            self.by_shapes[shapes] = found
        return found

    def _traced(self, inputs: PackedInputs, *, may_narrow: bool) -> Callable[..., tuple[list[jax.Array], Any]]:
        """The step of one layout as jax traces it, once."""

        def step(
            weights: tuple[jax.Array, ...],
            pages: Sequence[jax.Array],
            buffer: jax.Array,
            own: tuple[jax.Array, ...],
            previous: jax.Array,
            embeds: jax.Array | None,
            sampler_state: Any,
        ) -> tuple[list[jax.Array], Any]:
            batch, sampling = inputs.unpack(buffer, own)
            own_pages = jax.tree.unflatten(self._page_tree, pages)
            mesh, of_step = self._replicated.mesh, (batch, sampling, previous, embeds, sampler_state)
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if mesh.size > 1 else nullcontext():
                new_pages, rest = self._update(weights, own_pages, *of_step, may_narrow)
            return jax.tree.leaves(new_pages), rest

        return step


class _Program:
    """The step of one layout of inputs: one program, or a chain of them."""

    def __init__(
        self,
        name: str,
        step: Callable[..., Any],
        step_alike: Callable[..., Any] | None,  # the step to be cut, in which the last layer is like others; None: none
        inputs: PackedInputs,
        page_shardings: tuple[Any, ...],
        replicated: Any,
        compiler_options: dict[str, Any] | None,
    ) -> None:
        self.inputs = inputs
        self._name = name
        self._compiler_options = compiler_options
        self._page_shardings = page_shardings
        self._replicated = replicated
        pages = list(page_shardings)
        options: dict[str, Any] = {
            "donate_argnums": 1,
            "in_shardings": (None, pages, *(replicated,) * 5),
            "out_shardings": (pages, replicated),
            "compiler_options": compiler_options,
        }
        self._whole = jax.jit(step, **options)
        self._alike = None if step_alike is None else jax.jit(step_alike, **options)
        self._chain: StepChain | None = None
        self.run: Callable[..., Any] = self._first_run

    @property
    def num_compiled(self) -> int:
        if self._chain is not None:
            return int(self._chain.is_compiled)
        return int(self._whole._cache_size())  # type: ignore[attr-defined]

    def compiled(self, *arguments: Any) -> tuple[jax.stages.Compiled, ...]:
        """The modules of a step with these arguments."""
        chain = self._cut(arguments)
        return (self._whole.lower(*arguments).compile(),) if chain is None else chain.compiled(arguments)

    def _first_run(self, *arguments: Any) -> Any:
        with log_compiling(self._name):
            self._chain = self._cut(arguments)
            self.run = self._whole if self._chain is None else self._chain
            return self.run(*arguments)

    def _cut(self, arguments: Sequence[Any]) -> StepChain | None:
        if self._alike is None:
            return None
        traced = self._alike.trace(*arguments)
        weights, pages, _, own, _, *others = arguments
        first_page, num_inputs = len(weights), 2 + len(own)  # the buffer and the previous tokens
        first_input = first_page + len(pages)
        cut = cut_step(traced.jaxpr, range(first_page, first_input), range(first_input, first_input + num_inputs))
        if cut is None:
            return None
        num_others = num_inputs + len(jax.tree.leaves(others))
        return StepChain(
            traced.jaxpr,
            cut,
            shardings=[*[None] * first_page, *self._page_shardings, *[self._replicated] * num_others],
            replicated=self._replicated,
            rest=jax.tree.structure(traced.out_info[1]),
            compiler_options=self._compiler_options,
        )


__all__ = ["CompilerOptions", "StepPrograms"]

"""A step as a chain of programs, of which those that are alike are compiled once.

Flow:    pieces of a step -> [StepChain] -> one dispatch for each piece

Two pieces are the same program if their jaxprs are equal or, where these hold what cannot be compared (kernels), if
they lower to the same text: that tells shapes, constants, kernels, shardings and donated buffers. Page arrays are
donated from piece to piece, and arrays that no later piece uses are let go at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Var

from kvjax.device.programs.equal_jaxprs import equal_jaxprs
from kvjax.device.programs.step_cuts import Piece, StepCut


class _Call(NamedTuple):
    """One dispatch: a program, and places in the list of arrays."""

    program: Callable[..., Sequence[Any]]
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    dead: tuple[int, ...]  # what no later piece uses


class StepChain:
    """The programs of one layout of a step's inputs. Called as the whole step would be."""

    def __init__(
        self,
        closed: ClosedJaxpr,
        cut: StepCut,
        *,
        shardings: Sequence[Any],  # of each input of the step; None: as it is given
        replicated: Any,  # sharding of what pieces give each other beside page arrays
        rest: Any,  # structure of what the step leaves beside page arrays
        compiler_options: dict[str, Any] | None = None,  # of every program
    ) -> None:
        jaxpr = closed.jaxpr
        self._cut = cut
        self._consts = tuple(closed.consts)
        self._rest = rest
        self._compiler_options = compiler_options
        self._places: dict[Var, int] = {variable: i for i, variable in enumerate(jaxpr.invars)}
        self._shardings = list(shardings)
        for piece in cut.pieces:
            for i, atom in enumerate(piece.outputs):
                if isinstance(atom, Var) and atom not in self._places:
                    self._places[atom] = len(self._shardings)
                    is_page = i < piece.num_pages
                    self._shardings.append(self._sharding(piece.inputs[i]) if is_page else replicated)
        self._replicated = replicated
        self._page_places = [self._places[atom] for atom in cut.pages if isinstance(atom, Var)]
        self._by_text: dict[str, Any] = {}  # jitted functions by what they lower to
        self._jitted: dict[int, Any] = {}  # the function of each piece, by its number
        self._calls: tuple[_Call, ...] = ()

    @property
    def is_compiled(self) -> bool:
        """Whether it has run."""
        return bool(self._calls)

    @property
    def num_programs(self) -> int:
        """Programs that differ; 0 before it has run."""
        return len(self._by_text)

    def __call__(self, *arguments: Any) -> tuple[list[jax.Array], Any]:
        """Dispatches the pieces one after another: the page arrays, and what else the step leaves."""
        arrays: list[Any] = jax.tree.leaves(arguments)
        arrays += [None] * (len(self._shardings) - len(arrays))
        results: Sequence[Any] = ()
        if not self._calls:
            self._calls, results = self._first_run(arrays)
        else:
            for program, given, places, dead in self._calls:
                results = program(*[arrays[i] for i in given])
                for place, array in zip(places, results, strict=False):
                    arrays[place] = array
                for place in dead:
                    arrays[place] = None
        rest = jax.tree.unflatten(self._rest, results[len(results) - len(self._cut.rest) :])
        return [arrays[i] for i in self._page_places], rest

    def compiled(self, arguments: Sequence[Any]) -> tuple[jax.stages.Compiled, ...]:
        """The modules of all pieces; arguments may be ShapeDtypeStructs. Runs nothing."""
        arrays: list[Any] = jax.tree.leaves(arguments)
        arrays += [None] * (len(self._shardings) - len(arrays))
        modules: dict[Any, jax.stages.Compiled] = {}  # by jitted function
        found = []
        for number, piece in enumerate(self._cut.pieces):
            given = [arrays[self._places[variable]] for variable in piece.inputs]
            program = self._program(number, given)
            if program not in modules:
                modules[program] = program.lower(*given).compile()
            found.append(modules[program])
            for atom in piece.outputs:
                if isinstance(atom, Var):
                    aval: Any = atom.aval
                    arrays[self._places[atom]] = jax.ShapeDtypeStruct(
                        aval.shape, aval.dtype, sharding=self._sharding(atom)
                    )
        return tuple(found)

    def _first_run(self, arrays: list[Any]) -> tuple[tuple[_Call, ...], Sequence[Any]]:
        """Makes the calls while it runs them; the results of the last."""
        calls: list[_Call] = []
        results: Sequence[Any] = ()
        for number, piece in enumerate(self._cut.pieces):
            given = tuple(self._places[variable] for variable in piece.inputs)
            places = tuple(
                self._places[atom] for atom in piece.outputs[: self._num_kept(piece)] if isinstance(atom, Var)
            )
            arguments = [arrays[i] for i in given]
            program = self._program(number, arguments)
            results = program(*arguments)
            for place, array in zip(places, results, strict=False):
                arrays[place] = array
            calls.append(_Call(program, given, places, self._dead(number)))
        return tuple(calls), results

    def _program(self, number: int, arguments: Sequence[Any]) -> Any:
        """The jitted function of piece `number`, which may be that of an earlier one."""
        piece = self._cut.pieces[number]
        for place, earlier in enumerate(self._cut.pieces[:number]):
            if self._layout(earlier) == self._layout(piece) and equal_jaxprs(earlier.jaxpr, piece.jaxpr):
                self._jitted[number] = self._jitted[place]
                return self._jitted[number]
        program = self._jit(piece)
        self._jitted[number] = self._by_text.setdefault(program.lower(*arguments).as_text(), program)
        return self._jitted[number]

    def _num_kept(self, piece: Piece) -> int:
        """How many of a piece's outputs have places: all but the step's own of the last."""
        return len(piece.outputs) - (len(self._cut.rest) if piece is self._cut.pieces[-1] else 0)

    def _dead(self, number: int) -> tuple[int, ...]:
        """Places of what piece `number` is the last to use, page arrays that the step leaves excepted."""
        later = {variable for piece in self._cut.pieces[number + 1 :] for variable in piece.inputs}
        used = self._cut.pieces[number].inputs
        return tuple(
            place
            for place in (self._places[variable] for variable in used if variable not in later)
            if place not in self._page_places
        )

    def _jit(self, piece: Piece) -> Any:
        def run(*arrays: jax.Array) -> list[Any]:
            return piece(self._consts, arrays)

        run.__name__ = f"step_{piece.name}"
        inputs, outputs = self._layout(piece)
        return jax.jit(
            run,
            donate_argnums=tuple(range(piece.num_pages)),
            in_shardings=inputs,
            out_shardings=list(outputs),
            compiler_options=self._compiler_options,
        )

    def _layout(self, piece: Piece) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Shardings of a piece's inputs and outputs: what it has beside a jaxpr."""
        pages = tuple(map(self._sharding, piece.inputs[: piece.num_pages]))
        others = (self._replicated,) * (len(piece.outputs) - piece.num_pages)
        return tuple(map(self._sharding, piece.inputs)), (*pages, *others)

    def _sharding(self, variable: Any) -> Any:
        return self._shardings[self._places[variable]]


__all__ = ["StepChain"]

"""Cuts a traced step between its layers, so that layers alike are compiled once.

Flow:    jaxpr of a step with layer marks -> [cut_step] -> pieces -> `StepPrograms` compiles those that differ

XLA inlines every call, so a step that is one program takes the compiler as long as it has layers: a shared `jit` of a
layer saves the tracing only. A scan over layers compiles one, but wants weights and pages stacked: slices of the
weights are copied on a CPU, and page arrays of all layers together pass what kernels can address. Programs that are
called one after another have neither price, only that of a call for each, so a piece has some layers, not one.

    start       what comes before the first layer, and what layers share that depends on the step's inputs alone
    layers      pieces of equal numbers of layers; the last may have fewer
    end         what comes behind the last layer

Layers may differ: the size of the pieces is that which leaves the fewest layers to compile. A model of which cutting
would not save at least half of them stays one program.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from kvjax.device.programs.layer_marks import mark_p

LEAST_LAYERS = 4  # of a piece: a call costs the host about as much as the arrays of so many layers
MOST_LAYERS = 8
LEAST_CUT = 2 * LEAST_LAYERS  # layers of a model below which nothing is saved
Atom: TypeAlias = Var | Literal


@dataclass(frozen=True)
class Piece:
    """A part of a step: a program of its own. Called with the step's constants and its inputs, while tracing."""

    name: str
    jaxpr: Jaxpr  # of the step's constants and `inputs`
    inputs: tuple[Var, ...]
    outputs: tuple[Atom, ...]
    num_pages: int  # the first inputs are page arrays that the first outputs replace, one for one

    def __call__(self, consts: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        """The outputs of `inputs`."""
        return jaxpr_as_fun(ClosedJaxpr(self.jaxpr, ()))(*consts, *arrays)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True)
class StepCut:
    """A step in pieces. The last outputs of the last piece are `rest`."""

    pieces: tuple[Piece, ...]
    pages: tuple[Atom, ...]  # the page arrays behind all pieces
    rest: tuple[Atom, ...]  # the step's other outputs


@dataclass(frozen=True)
class _Part:
    """What stands between two marks."""

    equations: list[JaxprEqn]
    pages: tuple[Atom, ...]  # page arrays at its end


def cut_step(
    closed: ClosedJaxpr,
    page_inputs: range,  # places of the page arrays in the step's inputs; its first outputs are the same arrays
    step_inputs: Iterable[int],  # places of what comes from the host at every step
) -> StepCut | None:
    """The pieces of a step; None where one program is as good, or the step has effects beside its outputs."""
    jaxpr = closed.jaxpr
    parts, results = _parts(closed, page_inputs)
    num_layers = len(parts) - 2
    if num_layers < 1 or jaxpr.effects:
        return None
    _move_shared(parts, {jaxpr.invars[i] for i in step_inputs}, set(jaxpr.constvars))
    cuts = layer_cuts(list(map(_Kinds().of, parts[1:-1])))
    if not cuts:
        return None
    bounds = [(0, 1), *((start + 1, end + 1) for start, end in cuts), (num_layers + 1, num_layers + 2)]
    last_use = _last_uses(parts, bounds, results)
    pages: tuple[Atom, ...] = tuple(jaxpr.invars[i] for i in page_inputs)
    rest = results[len(page_inputs) :]
    pieces = []
    for place, (start, end) in enumerate(bounds):
        name = "start" if place == 0 else "end" if end == len(parts) else "layers"
        equations = [equation for part in parts[start:end] for equation in part.equations]
        new_pages = parts[end - 1].pages
        replaced = {
            old: new
            for old, new in zip(pages, new_pages, strict=True)
            if isinstance(old, Var) and old is not new and last_use.get(old, -1) <= place
        }
        used_later = {variable for variable, last in last_use.items() if last > place}
        pieces.append(_piece(name, jaxpr, equations, replaced, used_later, rest if name == "end" else ()))
        pages = new_pages
    return StepCut(tuple(pieces), results[: len(page_inputs)], rest)


def layer_cuts(kinds: Sequence[Any]) -> list[tuple[int, int]]:
    """First and end of each piece of layers of these kinds; none where cutting saves less than half of them."""

    def pieces(size: int) -> list[tuple[int, int]]:
        return [(i, min(i + size, len(kinds))) for i in range(0, len(kinds), size)]

    def num_compiled(cuts: list[tuple[int, int]]) -> int:
        return sum(map(len, {tuple(kinds[start:end]) for start, end in cuts}))

    best = min(map(pieces, range(LEAST_LAYERS, MOST_LAYERS + 1)), key=lambda cuts: (num_compiled(cuts), len(cuts)))
    return best if 2 * num_compiled(best) <= len(kinds) else []


def _parts(closed: ClosedJaxpr, page_inputs: range) -> tuple[list[_Part], tuple[Atom, ...]]:
    """What stands between the marks, and the step's outputs."""
    same: dict[Var, Atom] = {}  # what a mark gives -> what it is given

    def resolved(atom: Atom) -> Atom:
        return same.get(atom, atom) if isinstance(atom, Var) else atom

    parts: list[_Part] = []
    equations: list[JaxprEqn] = []
    for equation in closed.jaxpr.eqns:
        operands = tuple(map(resolved, equation.invars))
        if equation.primitive is mark_p:
            same.update(zip(equation.outvars, operands, strict=True))
            parts.append(_Part(equations, operands))
            equations = []
        else:
            equations.append(equation.replace(invars=list(operands)))
    results = tuple(map(resolved, closed.jaxpr.outvars))
    parts.append(_Part(equations, results[: len(page_inputs)]))
    return parts, results


def _move_shared(parts: list[_Part], step_inputs: set[Var], consts: set[Var]) -> None:
    """Moves to the first part what several parts use, if it depends on the step's inputs alone.

    The first layer that asks makes rotary tables and the like for all.
    """
    made: dict[Var, tuple[int, JaxprEqn]] = {}  # of the step's inputs alone
    free = step_inputs | consts
    for place, part in enumerate(parts):
        for equation in part.equations:
            if all(variable in free for variable in _variables(equation.invars)):
                free.update(equation.outvars)
                made.update(dict.fromkeys(equation.outvars, (place, equation)))
    moved: set[int] = set()
    wanted = [
        variable
        for place, part in enumerate(parts)
        for equation in part.equations
        for variable in _variables(equation.invars)
        if variable in made and made[variable][0] not in (0, place)
    ]
    while wanted:
        place, equation = made.get(wanted.pop(), (0, parts[0].equations[0]))
        if place and id(equation) not in moved:
            moved.add(id(equation))
            wanted += _variables(equation.invars)
    for part in parts[1:]:
        parts[0].equations.extend(equation for equation in part.equations if id(equation) in moved)
        part.equations[:] = [equation for equation in part.equations if id(equation) not in moved]


def _last_uses(parts: list[_Part], bounds: list[tuple[int, int]], results: tuple[Atom, ...]) -> dict[Var, int]:
    """The last piece that has a use for each variable; results are of use behind all."""
    last: dict[Var, int] = {}
    for place, (start, end) in enumerate(bounds):
        for part in parts[start:end]:
            for equation in part.equations:
                last.update(dict.fromkeys(_variables(equation.invars), place))
    last.update(dict.fromkeys(_variables(results), len(bounds)))
    return last


def _piece(
    name: str,
    step: Jaxpr,
    equations: list[JaxprEqn],
    replaced: dict[Var, Any],  # page array -> what takes its place
    used_later: set[Var],
    rest: tuple[Atom, ...],  # what it gives beside
) -> Piece:
    """A piece of these equations: page arrays come first, in the same order in inputs and outputs."""
    made = dict.fromkeys(variable for equation in equations for variable in equation.outvars)
    used = dict.fromkeys(variable for equation in equations for variable in _variables(equation.invars))
    used.update(dict.fromkeys(_variables(rest)))
    known = {*made, *step.constvars, *replaced}
    inputs = (*replaced, *(variable for variable in used if variable not in known))
    given = {*replaced.values(), *_variables(rest)}
    kept = [variable for variable in made if variable in used_later and variable not in given]
    outputs = (*replaced.values(), *kept, *rest)
    jaxpr = step.replace(constvars=[], invars=[*step.constvars, *inputs], outvars=list(outputs), eqns=equations)
    return Piece(name, jaxpr, inputs, outputs, len(replaced))


def _variables(atoms: Iterable[Atom]) -> list[Var]:
    return [atom for atom in atoms if isinstance(atom, Var)]


class _Kinds:
    """What equations of layers alike have in common, as text: a hint, since programs are compared when lowered."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}  # of functions inside equations, by identity: layers alike share many

    def of(self, part: _Part) -> tuple[str, ...]:
        """The texts of a layer's equations."""
        return tuple(map(self._of_equation, part.equations))

    def _of_equation(self, equation: JaxprEqn) -> str:
        shapes = [str(atom.aval) for atom in (*equation.invars, *equation.outvars)]
        params = [f"{name}={self._text(value)}" for name, value in sorted(equation.params.items())]
        return " ".join((equation.primitive.name, *shapes, *params))

    def _text(self, value: Any) -> str:
        if id(value) not in self._texts:
            self._texts[id(value)] = re.sub(r"0x[0-9a-f]+|id=\d+", "", str(value))
        return self._texts[id(value)]


__all__ = ["Piece", "StepCut", "cut_step", "layer_cuts"]

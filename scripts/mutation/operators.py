"""The operators whose changes are sampled: those of cosmic-ray that a slip of the pen makes, and ours.

Flow:    cosmic_ray.operators + [operators] -> OPERATORS -> sites
Source:  cosmic-ray, https://cosmic-ray.readthedocs.io (operator plugins); it parses with parso and keeps all other text

Of cosmic-ray's replacements of `+` by eleven others we take the one that is a likely mistake: the other ten fail the
first test that runs them, and would fill the sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import parso.python.tree
from cosmic_ray.operators import (
    binary_operator_replacement,
    boolean_replacer,
    break_continue,
    comparison_operator_replacement,
    exception_replacer,
    number_replacer,
    unary_operator_replacement,
    zero_iteration_for_loop,
)
from cosmic_ray.operators.operator import Example, Operator

Position = tuple[tuple[int, int], tuple[int, int]]

# name -> name, both ways; also as methods and numpy functions: np.minimum, x.argmin()
_NAMES = {"min": "max", "argmin": "argmax", "minimum": "maximum", "any": "all"}
_AUGMENTED = {"+=": "-=", "|=": "&="}
CHANGED_NAMES = _NAMES | {new: old for old, new in _NAMES.items()}
CHANGED_AUGMENTED = _AUGMENTED | {new: old for old, new in _AUGMENTED.items()}
BINARY = {
    "Add_Sub",
    "Sub_Add",
    "Mul_FloorDiv",
    "Div_Mul",
    "FloorDiv_Mul",
    "Mod_FloorDiv",
    "Pow_Mul",
    "RShift_LShift",
    "LShift_RShift",
    "BitOr_BitAnd",
    "BitAnd_BitOr",
    "BitXor_BitOr",
}


class SwapName(Operator):
    """`min` for `max`, `any` for `all` and the like, where they are called."""

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        if isinstance(node, parso.python.tree.Name) and node.value in CHANGED_NAMES and _is_called(node):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        node.value = CHANGED_NAMES[node.value]
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("min(a, b)", "max(a, b)"), Example("np.maximum(a, b)", "np.minimum(a, b)"))


class SwapAugmented(Operator):
    """`-=` for `+=`, `&=` for `|=`, and back."""

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        if isinstance(node, parso.python.tree.Operator) and node.value in CHANGED_AUGMENTED:
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        node.value = CHANGED_AUGMENTED[node.value]
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("x += 1", "x -= 1"), Example("x &= y", "x |= y"))


class SwapMembership(Operator):
    """`not in` for `in`, and back, in comparisons."""

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        if node.type == "comparison":
            for child in node.children[1::2]:
                if _words(child) in ("in", "not in"):
                    yield child.start_pos, child.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        places = [i for i in range(1, len(node.children), 2) if _words(node.children[i]) in ("in", "not in")]
        place = places[index]
        node.children[place] = parso.parse(" not in" if _words(node.children[place]) == "in" else " in")
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("x in y", "x not in y"), Example("x not in y", "x in y"))


@cache
def operators() -> dict[str, type[Operator]]:
    """Every operator by its name: the same names in every run, since a sample depends on them."""
    chosen = [SwapName, SwapAugmented, SwapMembership]
    chosen += [op for op in binary_operator_replacement.operators() if op.__name__.split("_", 1)[1] in BINARY]
    chosen += [op for op in comparison_operator_replacement.operators() if _is_comparison_slip(op.__name__)]
    chosen += [op for op in unary_operator_replacement.operators() if "_Delete_" in op.__name__]
    chosen += [
        boolean_replacer.AddNot,
        boolean_replacer.ReplaceTrueWithFalse,
        boolean_replacer.ReplaceFalseWithTrue,
        boolean_replacer.ReplaceAndWithOr,
        boolean_replacer.ReplaceOrWithAnd,
        break_continue.ReplaceBreakWithContinue,
        break_continue.ReplaceContinueWithBreak,
        exception_replacer.ExceptionReplacer,
        number_replacer.NumberReplacer,
        zero_iteration_for_loop.ZeroIterationForLoop,
    ]
    return {op.__name__: op for op in chosen}


def _is_comparison_slip(name: str) -> bool:
    """Orders and equalities among themselves, `is` with `is not`; `is` for `==` is a matter of style."""
    _, old, new = name.split("_")
    return {old, new} == {"Is", "IsNot"} or not {old, new} & {"Is", "IsNot"}


def _is_called(name: Any) -> bool:
    following = name.get_next_leaf()
    return following is not None and following.value == "(" and name.parent.type not in ("funcdef", "param")


def _words(node: Any) -> str:
    return " ".join(node.get_code().split())

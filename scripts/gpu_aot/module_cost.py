"""Launches and bytes of a module compiled for a GPU, read off its text.

Flow:    text of a compiled module, how often its loops run -> [ModuleCost] -> launches, bytes

A kernel reads its operands and writes its results; of one in Triton its author says how much. Of an operand that it
only gathers or slices it reads as much as it takes; into one that it scatters or updates in place it writes as much as
it puts there. Caches are not modelled.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

_ARRAY = r"([a-z]\w*)\[([\d,]*)\]"
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "iota"}
_VIEWS = {"bitcast", "convert", "reshape", "copy", "transpose"}
_TAKES = {"gather", "dynamic-slice", "slice"}
_PUTS = {"scatter": 2, "dynamic-update-slice": 1}  # op -> operand that holds what is put


class Cost(NamedTuple):
    """What something costs."""

    launches: float = 0
    num_bytes: float = 0

    def plus(self, other: Cost, times: float = 1) -> Cost:
        """The sum, `other` so many times."""
        return Cost(self.launches + times * other.launches, self.num_bytes + times * other.num_bytes)


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    shape: str
    op: str
    operands: tuple[str, ...]
    line: str
    is_root: bool

    @property
    def num_bytes(self) -> int:
        """Of the result."""
        return shape_bytes(self.shape)

    def called(self, what: str) -> str:
        """The computation that it names as `what`."""
        match = re.search(rf"{what}=%?([\w.\-]+)", self.line)
        return match[1] if match else ""

    @property
    def scope(self) -> str:
        """Where the program says that it is."""
        match = re.search(r'op_name="([^"]*)"', self.line)
        return match[1] if match else ""


class Loop(NamedTuple):
    """A loop of the module."""

    scope: str
    known_trips: int | None


Trips = Callable[[Loop], float]  # how often a loop's body runs in all, of one that the compiler cannot tell
Kernels = Callable[[str], float]  # bytes that a kernel in Triton moves, by its scope
_TRITON = 'custom_call_target="__gpu$xla.gpu.triton"'


def no_kernels(scope: str) -> float:
    """Of modules that have none.

    Raises:
        ValueError: it has one.
    """
    raise ValueError(f"expected no kernel in Triton, got {scope}")


class ModuleCost:
    """The computations of a module."""

    def __init__(self, text: str, trips: Trips, kernels: Kernels = no_kernels) -> None:
        self._computations: dict[str, list[Instruction]] = {}
        self._trips = trips
        self._kernels = kernels
        self._entry = ""
        self._parse(text)

    def total(self) -> Cost:
        """Of one call."""
        return self._computation(self._entry, 1)

    def _parse(self, text: str) -> None:
        body: list[Instruction] = []
        for line in text.splitlines():
            header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line)
            if header:
                body = self._computations[header[2]] = []
                self._entry = header[2] if header[1] else self._entry
            elif match := re.match(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)", line):
                operands = tuple(re.findall(r"%([\w.\-]+)", match[5].split("), ")[0]))
                body.append(Instruction(match[2], match[3], match[4], operands, line, bool(match[1])))

    def _computation(self, name: str, times: float) -> Cost:
        """Of a computation that runs `times` times in all."""
        cost = Cost()
        shapes = {instruction.name: instruction for instruction in self._computations[name]}
        for instruction in self._computations[name]:
            if instruction.op == "while":
                known = re.search(r'known_trip_count":\{"n":"(\d+)"', instruction.line)
                loop = Loop(instruction.scope, int(known[1]) if known else None)
                runs = times * loop.known_trips if loop.known_trips is not None else self._trips(loop)
                cost = cost.plus(self._computation(instruction.called("body"), runs))
                cost = cost.plus(self._computation(instruction.called("condition"), runs + times))
            elif instruction.op == "conditional":
                branches = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", instruction.line)
                found = re.search(r"branch_computations=\{([^}]*)\}", instruction.line)
                branches += re.findall(r"%?([\w.\-]+)", found[1]) if found else []
                cost = cost.plus(max((self._computation(branch, times) for branch in branches), key=lambda c: c[1]))
            elif instruction.op == "call" or instruction.op.endswith("-start"):
                cost = cost.plus(self._computation(instruction.called("(?:to_apply|calls)"), times))
            elif instruction.op == "custom-call" and _TRITON in instruction.line:
                cost = cost.plus(Cost(1, self._kernels(instruction.scope)), times)
            elif instruction.op not in _FREE and not instruction.op.endswith("-done"):
                operands = [shapes[x] for x in instruction.operands if x in shapes]
                cost = cost.plus(Cost(1, self._kernel_bytes(instruction, operands)), times)
        return cost

    def _kernel_bytes(self, instruction: Instruction, operands: list[Instruction]) -> int:
        if instruction.op in _PUTS:
            return 2 * operands[_PUTS[instruction.op]].num_bytes
        if instruction.op in _TAKES:
            return 2 * instruction.num_bytes
        if instruction.op != "fusion":
            return instruction.num_bytes + sum(operand.num_bytes for operand in operands)
        body = Body(self._computations[instruction.called("calls")])
        return body.bytes_read() + body.bytes_written()


class Body:
    """The computation of a fusion."""

    def __init__(self, instructions: list[Instruction]) -> None:
        self._by_name = {instruction.name: instruction for instruction in instructions}
        self._instructions = instructions

    def bytes_read(self) -> int:
        """Of all parameters."""
        return sum(self._read(x) for x in self._instructions if x.op == "parameter")

    def bytes_written(self) -> int:
        """Of all results."""
        (root,) = (x for x in self._instructions if x.is_root)
        return sum(self._written(x) for x in self._results(root))

    def _read(self, parameter: Instruction) -> int:
        reads = 0
        for name, user in self._users(parameter.name):
            if user.op in _TAKES and user.operands[0] == name:
                reads += user.num_bytes * item_bytes(parameter.shape) // item_bytes(user.shape)
            elif not (user.op in _PUTS and user.operands[0] == name):
                return parameter.num_bytes
        return min(reads, parameter.num_bytes)

    def _users(self, name: str) -> Iterator[tuple[str, Instruction]]:
        """Those of a value, and of what is but another view of it, each with the name by which it uses it."""
        for user in self._instructions:
            if name in user.operands:
                if user.op in _VIEWS and not user.is_root:
                    yield from self._users(user.name)
                else:
                    yield name, user

    def _results(self, root: Instruction) -> Iterator[Instruction]:
        if root.op == "tuple":
            for name in root.operands:
                yield from self._results(self._by_name[name])
        elif root.op == "bitcast":
            yield from self._results(self._by_name[root.operands[0]])
        else:
            yield root

    def _written(self, result: Instruction) -> int:
        if result.op in _PUTS:
            return self._by_name[result.operands[_PUTS[result.op]]].num_bytes
        return result.num_bytes


@functools.cache
def shape_bytes(shape: str) -> int:
    """Bytes of a shape, or of all of a tuple."""
    found = re.findall(_ARRAY, shape)
    return sum(_item(dtype) * math.prod(int(size) for size in sizes.split(",") if size) for dtype, sizes in found)


def item_bytes(shape: str) -> int:
    """Bytes of a number of an array."""
    return _item(re.findall(_ARRAY, shape)[0][0])


def _item(dtype: str) -> int:
    """Bytes of a dtype by its name: pred, bf16, s32, f8e4m3fn, ..."""
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) // 8 if digits else 1

"""One call of an op: sizes and options, its arguments, its work, and what it must give.

Flow:    <op>/cases.py -> [Case] -> benchmarks, compilers and the fuzzer of scripts/, laws of tests/pallas_kernels

A subclass is a frozen dataclass. Its fields have defaults that are words or numbers, so that a command line can set
each by name=value, and two cases that are equal are the same call.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases.compare import assert_close, assert_same

Sizes: TypeAlias = dict[str, Any]  # values by the names of a case's fields


class Work(NamedTuple):
    """The least that a call does: each byte of its inputs read once and of its outputs written once, layout padding
    apart; multiplications and additions of its sums."""

    num_bytes: int
    flops: int


class Arguments(NamedTuple):
    """The arguments of one call. `pages` are the page arrays, which an op that writes gets donated."""

    pages: tuple[Any, ...]
    rest: Any


class Results(NamedTuple):
    """What one call gives: its outputs, and the page arrays that it wrote."""

    outs: Any
    pages: tuple[Any, ...]


@dataclass(frozen=True)
class Step:
    """How large a benchmark's step is; 0: as the op's kind of step says."""

    batch: int = 0  # sequences, pages or tokens
    context: int = 0  # tokens of a sequence
    small: bool = False  # a few tokens, for a run on CPU


class OfSequences:
    """What cases of a step of equal sequences have in common, each of which leaves states or entries."""

    tokens: int
    seqs: int

    @property
    def writes(self) -> bool:
        """Every step does."""
        return True

    @property
    def size(self) -> str:
        """Sequences and their new tokens."""
        count = self.tokens // self.seqs
        return f"{self.seqs}x{count}" + (f"of{count}" if count > 1 else "")


@dataclass(frozen=True)
class Case(abc.ABC):
    """Sizes and options of one call."""

    platform: str = dataclasses.field(default="tpu", kw_only=True)  # whose page layout

    op: ClassVar[str]
    calls: ClassVar[tuple[str, ...]] = ()  # names of the op's functions, where they are several
    shapes: ClassVar[tuple[Any, ...]]  # layers of real models, each with a `name`
    kinds: ClassVar[tuple[str, ...]]  # of steps that are timed
    backends: ClassVar[tuple[str, ...]] = ("reference",)  # each with code of its own
    compiled: ClassVar[tuple[str, ...]] = ("tpu", "gpu")  # platforms that the op is compiled for ahead of time
    defaults: ClassVar[Mapping[str, Sizes]] = {}  # fields of what is compiled, by platform
    # Bytes of a kernel for GPU, by (a part of the settings, the start of its name).
    allowed_spills: ClassVar[Mapping[tuple[str, str], int]] = {}
    scored: ClassVar[str] = ""  # names of kernels whose loops over blocks have a score
    features: ClassVar[tuple[str, ...]] = ()  # settings that are compiled for GPU beside the models' shapes
    in_subset: ClassVar[tuple[str, ...]] = ("",)  # settings of the few that CI compiles for GPU
    tpu_features: ClassVar[tuple[str, ...]] = ()  # settings whose cost is set beside that of the case without them

    @classmethod
    @abc.abstractmethod
    def of_shape(cls, shape: Any, num_shards: int) -> Sizes:
        """What a layer of `shapes` says of one of so many tensor-parallel shards.

        Raises:
            ValueError: the layer does not split so.
        """

    @classmethod
    def kinds_of(cls, shape: Any) -> tuple[str, ...]:
        """Those of `kinds` that a layer of `shapes` is timed in."""
        del shape
        return cls.kinds

    @classmethod
    @abc.abstractmethod
    def of_kind(cls, kind: str, step: Step) -> Sizes:
        """What one of `kinds` says."""

    @classmethod
    def to_compile(cls, shape: Any, num_shards: int) -> Iterator[tuple[str, Sizes]]:
        """(label, sizes) of what is compiled ahead of time of a layer.

        Raises:
            ValueError: the layer does not split so.
        """
        yield shape.name, cls.of_shape(shape, num_shards)

    @classmethod
    @abc.abstractmethod
    def random(cls, rng: np.random.Generator, backend: str) -> Case:
        """A small case of any options that the backend takes."""

    @property
    def writes(self) -> bool:
        """Whether the call writes into its pages."""
        return False

    @property
    @abc.abstractmethod
    def size(self) -> str:
        """Sequences and tokens, in words."""

    @property
    @abc.abstractmethod
    def work(self) -> Work:
        """The work of one call."""

    @abc.abstractmethod
    def arguments(self, seed: int) -> Arguments:
        """As a server has them, on the default device. Where jax traces this, large arrays are shapes alone."""

    @abc.abstractmethod
    def hard_arguments(self, rng: np.random.Generator) -> Arguments:
        """As they try the op hardest: NaN where nobody may look, numbers at the ends of ranges."""

    @abc.abstractmethod
    def call(self, backend: str, pages: tuple[Any, ...], rest: Any) -> Results:
        """The op itself; arrays alone are results."""

    @abc.abstractmethod
    def expected(self, arguments: Arguments) -> Results:
        """By the op's oracle, in numpy."""

    def assert_right(self, found: Results, arguments: Arguments) -> None:
        """Pages hold what is expected bit for bit, outputs as closely as their dtype holds numbers."""
        expected = self.expected(arguments)
        assert_same(found.pages, expected.pages)
        assert_close(found.outs, expected.outs)


CaseT = TypeVar("CaseT", bound=Case)


def splits(case_type: type[Case], shape: Any, num_shards: int) -> bool:
    """Whether a layer of the op splits into so many shards."""
    try:
        case_type.of_shape(shape, num_shards)
    except ValueError:
        return False
    return True


def most_shards(case_type: type[Case], shape: Any) -> int:
    """The shards, up to eight, that have the fewest heads of a layer."""
    return max(n for n in range(1, 9) if splits(case_type, shape, n))


def of_step(
    case_type: type[CaseT], shape: Any, kind: str, step: Step = Step(), *, num_shards: int = 1, **given: Any
) -> CaseT:
    """A kind of step of a shard of a layer; of `given` what is a field of the case and what neither of them says.

    Raises:
        ValueError: the layer does not split so, or there is no such kind.
    """
    values = given | case_type.of_shape(shape, num_shards) | case_type.of_kind(kind, step)
    names = {field.name for field in dataclasses.fields(case_type)}
    return case_type(**{name: value for name, value in values.items() if name in names})


def parse(case_type: type[Case], settings: list[str], **defaults: Any) -> Case:
    """A case with fields set by name=value. `model=NAME shards=N` sets what a layer of `shapes` says of a shard.

    `defaults` are set where the op has such a field and the settings say nothing.

    Raises:
        ValueError: a name is none of the case's, a value is not of its type, or no layer is called so.
    """
    fields: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(case_type)}
    given = dict(setting.partition("=")[::2] for setting in settings)
    values = {name: value for name, value in defaults.items() if name in fields}
    values |= case_type.defaults.get(values.get("platform", ""), {})
    if "model" in given:
        model, num_shards = given.pop("model"), int(given.pop("shards", "1"))
        shapes = {shape.name: shape for shape in case_type.shapes}
        if model not in shapes:
            raise ValueError(f"expected a model out of {sorted(shapes)}, got {model!r}")
        values |= case_type.of_shape(shapes[model], num_shards)
    for name, text in given.items():
        if name not in fields:
            raise ValueError(f"expected a setting out of {sorted(fields)}, model and shards, got {name!r}")
        values[name] = type(fields[name])(text)
    return case_type(**values)


def settings_of(sizes: Sizes) -> list[str]:
    """`sizes` as name=value."""
    return [f"{name}={value}" for name, value in sizes.items()]


def itemsize(dtype: str) -> int:
    """Bytes of a number."""
    return jnp.dtype(dtype).itemsize


def argument_shapes(case: Case) -> Arguments:
    """Shapes and dtypes of the case's arguments; no large array is made."""
    return jax.eval_shape(lambda: case.arguments(0))

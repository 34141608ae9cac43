"""What one kernel benchmark is: arguments, a call, and the bytes and operations that nothing can do without.

Flow:    case types of pallas_kernels' ops, Sizes -> [bench_cases] -> BenchCase ... -> driver -> rows of the table
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import jax

from pallas_kernels.cases.case import Arguments, Case, Step, Work, splits

_MOST_SHARDS = 8


@dataclass(frozen=True)
class Sizes:
    """What the command line says of every case."""

    platform: str  # "tpu" or "gpu": whose page layout
    page: int = 128  # tokens
    dtype: str = "bfloat16"  # of the pages
    shards: int = 1  # tensor parallelism; one shard is measured
    batch: int = 0  # 0: by the case; as is the context
    context: int = 0
    small: bool = False  # a few tokens and heads, for a run on CPU

    @property
    def q_dtype(self) -> str:
        """Of everything that is not a page."""
        return "float32" if self.dtype == "float32" else "bfloat16"


@dataclass(frozen=True)
class BenchCase:
    """One op at one size. `call(backend, pages, rest)` gives (outputs, page arrays written or ())."""

    op: str
    kind: str  # decode, prefill...
    shape: str  # of the op's shapes.py
    size: str  # batch x context, in words
    sizes: Sizes
    work: Work
    arguments: Callable[[int], Arguments]  # of a seed
    call: Callable[[str, tuple[jax.Array, ...], Any], tuple[Any, tuple[jax.Array, ...]]]
    small: Callable[[], BenchCase]  # the same with few tokens and heads
    writes: bool = False
    setting: Any = None  # what rivals of this op need to know
    same: Any = None  # what cases that measure the same have in common: the `Case`, or what a shape says but its name

    @property
    def name(self) -> str:
        """Unlike that of any other case."""
        return f"{self.op}/{self.kind}/{self.shape}/{self.size}/page {self.sizes.page}/{self.sizes.dtype}"

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal of cases that measure the same."""
        if isinstance(self.same, Case):
            return (self.same,)
        return self.op, self.kind, self.size, self.sizes, self.same


def bench_cases(case_type: type[Case], sizes: Sizes) -> Iterator[BenchCase]:
    """Every shape of the op that splits so, each kind of step."""
    for shape in case_type.shapes:
        for kind in case_type.kinds if splits(case_type, shape, sizes.shards) else ():
            yield bench_case(case_type, kind, shape, sizes)


def bench_case(case_type: type[Case], kind: str, shape: Any, sizes: Sizes) -> BenchCase:
    """One kind of step of one shape."""
    names = {field.name for field in fields(case_type)}
    given = {"platform": sizes.platform, "page": sizes.page, "dtype": sizes.dtype, "q_dtype": sizes.q_dtype}
    given |= case_type.of_shape(shape, sizes.shards)
    given |= case_type.of_kind(kind, Step(sizes.batch, sizes.context, sizes.small))
    case = case_type(**{name: value for name, value in given.items() if name in names})
    shards = max(n for n in range(1, _MOST_SHARDS + 1) if splits(case_type, shape, n))
    small = replace(sizes, small=True, shards=shards)  # as few heads as the shape gives
    return BenchCase(
        case.op,
        kind,
        shape.name,
        case.size,
        sizes,
        case.work,
        case.arguments,
        case.call,
        lambda: bench_case(case_type, kind, shape, small),
        writes=case.writes,
        setting=case,
        same=case,
    )

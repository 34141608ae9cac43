"""What one kernel benchmark is: a case of an op, the kind of step and the model that it is of, and the same in small.

Flow:    case types of pallas_kernels' ops, Sizes -> [bench_cases] -> BenchCase ... -> driver -> rows of the table
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from pallas_kernels.cases.case import Case, Step, most_shards, of_step, splits


@dataclass(frozen=True)
class Sizes:
    """What the command line says of every case."""

    platform: str  # "tpu" or "gpu": whose page layout
    page: int = 128  # tokens
    dtype: str = "bfloat16"  # of the pages
    shards: int = 1  # tensor parallelism; one shard is measured
    step: Step = field(default_factory=Step)

    @property
    def given(self) -> dict[str, Any]:
        """By the names of cases' fields; what is no page is float32 where pages are, else bfloat16."""
        q_dtype = "float32" if self.dtype == "float32" else "bfloat16"
        return {"platform": self.platform, "page": self.page, "dtype": self.dtype, "q_dtype": q_dtype}


@dataclass(frozen=True)
class BenchCase:
    """One op at one size."""

    case: Case
    kind: str  # decode, prefill...
    model: str  # of the op's shapes
    sizes: Sizes
    small: Case  # the same with few tokens and heads, for a run on CPU

    @property
    def name(self) -> str:
        """Unlike that of any other case."""
        size = f"{self.case.size}/page {self.sizes.page}/{self.sizes.dtype}"
        return f"{self.case.op}/{self.kind}/{self.model}/{size}"


def bench_cases(case_type: type[Case], sizes: Sizes) -> Iterator[BenchCase]:
    """Every layer of the op that splits so, each kind of step."""
    for shape in case_type.shapes:
        for kind in case_type.kinds_of(shape) if splits(case_type, shape, sizes.shards) else ():
            yield bench_case(case_type, kind, shape, sizes)


def bench_case(case_type: type[Case], kind: str, shape: Any, sizes: Sizes) -> BenchCase:
    """One kind of step of one layer."""
    case = of_step(case_type, shape, kind, sizes.step, num_shards=sizes.shards, **sizes.given)
    in_small, shards = replace(sizes.step, small=True), most_shards(case_type, shape)
    small = of_step(case_type, shape, kind, in_small, num_shards=shards, **sizes.given)
    return BenchCase(case, kind, shape.name, sizes, small)

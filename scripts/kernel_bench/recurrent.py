"""Steps of recurrent layers: sequences that go on from their states, with or without drafts, or a fresh prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases.case import Arguments, Work
from scripts.kernel_bench.case import BenchCase, Sizes
from scripts.kernel_bench.shards import splits, with_most_shards
from scripts.kernel_bench.step import Rows, words

Shape = TypeVar("Shape", bound=Any)
CaseFn: TypeAlias = Callable[[str, Shape, Sizes], BenchCase]  # of a kind and a shape

KINDS = ("decode", "drafts", "prefill")
_NUM_DRAFTS = 3


@dataclass(frozen=True)
class StateStep:
    """New tokens of each sequence, the last `num_kept` of which leave a state each."""

    rows: Rows
    has_states: bool  # from the steps before
    num_kept: int = 1

    @classmethod
    def of(cls, kind: str, sizes: Sizes) -> StateStep:
        """`batch` sequences that decode one token or verify drafts, too, or a prefill of `context` tokens."""
        if kind == "prefill":
            length = 20 if sizes.small else sizes.context or 8192
            return cls(((length, length),), False)
        num_tokens = 1 if kind == "decode" else 1 + _NUM_DRAFTS
        return cls(((num_tokens, num_tokens),) * (3 if sizes.small else sizes.batch or 64), True, num_tokens)

    @property
    def num_tokens(self) -> int:
        """New ones."""
        return sum(q for q, _ in self.rows)

    @property
    def num_written(self) -> int:
        """States."""
        return len(self.rows) * self.num_kept

    @property
    def num_moved(self) -> int:
        """States that are read or written, a state that is both twice."""
        return self.num_written + len(self.rows) * self.has_states

    def arrays(self, rng: np.random.Generator) -> tuple[jax.Array, ...]:
        """(query_start_loc, distribution, state_read, state_write, has_initial_state): each state in its own page."""
        num_seqs = len(self.rows)
        starts = np.cumsum([0, *(q for q, _ in self.rows)])
        num_decode = num_seqs if self.has_states and self.num_kept == 1 else 0
        write = 1 + rng.permutation(self.num_written).reshape(num_seqs, self.num_kept)
        ints = (starts, (num_decode, num_decode, num_seqs), write[:, -1], write)
        return (*(jnp.asarray(x, jnp.int32) for x in ints), jnp.full(num_seqs, self.has_states))


def cases_of(shapes: Sequence[Shape], sizes: Sizes, case: CaseFn[Shape]) -> Iterator[BenchCase]:
    """Every kind of step of every shape that splits so."""
    for shape in shapes:
        for kind in KINDS if splits(shape, sizes.shards) else ():
            yield case(kind, shape, sizes)


def case_of(
    op: str,
    kind: str,
    shape: Shape,
    sizes: Sizes,
    *,
    work: Callable[[StateStep, Shape, Sizes], Work],
    arguments: Callable[[StateStep, Shape, Sizes, int], Arguments],
    call: Callable[[str, Any, Any], tuple[Any, Any]],
    case: CaseFn[Shape],  # the op's own, for the small one
    same: Any = None,
) -> BenchCase:
    """One step of one shape; `same` as of a `BenchCase`."""
    step = StateStep.of(kind, sizes)
    return BenchCase(
        op,
        kind,
        shape.name,
        words(step.rows),
        sizes,
        work(step, shape, sizes),
        lambda seed: arguments(step, shape, sizes, seed),
        call,
        lambda: case(kind, shape, with_most_shards(shape, replace(sizes, small=True))),
        writes=True,
        has_tokens_in_pages=False,
        same=same,
    )

"""Which entries are tuned, and which sizes are tried for one.

Flow:    shapes x TP x pages -> [cases] -> Case; sizes of each part -> [candidates] -> one row per measurement
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from pallas_kernels.mask import MaskRule
from pallas_kernels.ragged_paged_attention.shapes import SHAPES, AttentionShape
from pallas_kernels.ragged_paged_attention.tuning import TunedShape
from pallas_kernels.tuned import Sizes


@dataclass(frozen=True)
class Case:
    """One entry to tune."""

    model: AttentionShape
    num_shards: int
    page_size: int
    page_dtype: str = "bfloat16"

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.model.name} / {self.num_shards}, page {self.page_size}"

    @property
    def mask(self) -> MaskRule:
        """Who sees what."""
        return MaskRule(True, self.model.sliding_window, self.model.attention_chunk_size)

    @property
    def shape(self) -> TunedShape:
        """What the tuned file calls it."""
        heads, kv_heads = self.model.per_shard(self.num_shards)
        sizes = (heads, kv_heads, self.model.head_dim, self.page_size)
        return TunedShape(
            *sizes, "bfloat16", self.page_dtype, self.model.sliding_window, self.model.attention_chunk_size
        )


def cases(models: Iterable[str], shards: Iterable[int], pages: Iterable[int]) -> list[Case]:
    """Those of the named models' layers; those that share an entry once.

    Raises:
        ValueError: a name is none of shapes.py, or its heads do not split into so many shards.
    """
    known, found = {shape.name: shape for shape in SHAPES}, {}
    for page_size in pages:
        for model in models:
            if model not in known:
                raise ValueError(f"expected a model out of {sorted(known)}, got {model!r}")
            for num_shards in shards:
                case = Case(known[model], num_shards, page_size)
                found.setdefault(case.shape, case)
    return list(found.values())


def candidates(*parts: Iterable[Sizes]) -> Iterator[Sizes]:
    """No sizes, then the parts' candidates side by side, since one measurement has every part."""
    yield {}
    for row in zip_longest(*parts, fillvalue={}):
        yield {name: size for sizes in row for name, size in sizes.items()}

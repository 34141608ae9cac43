"""Which entries are tuned, and which sizes are tried for one.

Flow:    shapes x TP x pages -> [entries] -> Entry; sizes of each part -> [candidates] -> one row per measurement
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from pallas_kernels.cases.case import Step, of_step
from pallas_kernels.mask import MaskRule
from pallas_kernels.ragged_paged_attention.cases import AttentionCase
from pallas_kernels.ragged_paged_attention.shapes import SHAPES, AttentionShape
from pallas_kernels.ragged_paged_attention.tuning import TunedShape
from pallas_kernels.tuned import Sizes


@dataclass(frozen=True)
class Entry:
    """One entry to tune."""

    model: AttentionShape
    num_shards: int
    page_size: int

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
        return TunedShape(*sizes, "bfloat16", "bfloat16", self.model.sliding_window, self.model.attention_chunk_size)

    def settings(self, sizes: Sizes) -> list[str]:
        """Of a compilation with `sizes` and no others."""
        own = {"model": self.model.name, "shards": self.num_shards, "page": self.page_size, "tuned": 0}
        return [f"{name}={value}" for name, value in {**own, **sizes}.items()]

    def timed(self, kind: str, sizes: Sizes, step: Step = Step()) -> AttentionCase:  # noqa: B008
        """A kind of step on a GPU with `sizes` and no others."""
        own: dict[str, Any] = {"platform": "gpu", "page": self.page_size, "tuned": 0, **sizes}
        return of_step(AttentionCase, self.model, kind, step, num_shards=self.num_shards, **own)


def entries(models: Iterable[str], shards: Iterable[int], pages: Iterable[int]) -> list[Entry]:
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
                entry = Entry(known[model], num_shards, page_size)
                found.setdefault(entry.shape, entry)
    return list(found.values())


def candidates(*parts: Iterable[Sizes]) -> Iterator[Sizes]:
    """No sizes, then the parts' candidates side by side, since one measurement has every part."""
    yield {}
    for row in zip_longest(*parts, fillvalue={}):
        yield {name: size for sizes in row for name, size in sizes.items()}

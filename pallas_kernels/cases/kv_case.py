"""Cases over pages of K and V: their sizes, their layout, and what a model's layer says of them."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pallas_kernels.cases.case import Case, Sizes
from pallas_kernels.layouts import PageLayout, attention_layout


@dataclass(frozen=True)
class KVCase(Case, ABC):
    """Sizes of the pages."""

    kv_heads: int = 8
    head_dim: int = 128
    page: int = 128  # tokens
    dtype: str = "bfloat16"  # of the pages
    num_pages: int = 0  # 0: a pool

    @classmethod
    def of_shape(cls, shape: Any, num_shards: int) -> Sizes:
        """KV heads of a shard, of a layer that says them second."""
        return {"kv_heads": shape.per_shard(num_shards)[1], "head_dim": shape.head_dim}

    @classmethod
    def to_compile(cls, shape: Any, num_shards: int) -> Iterator[tuple[str, Sizes]]:
        """One KV head in fp8 too."""
        yield from one_head_in_fp8_too(shape.name, cls.of_shape(shape, num_shards))

    @property
    def layout(self) -> PageLayout:
        """The layout of the pages."""
        return attention_layout(
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            page_size=self.page,
            dtype=self.dtype,
            platform=self.platform,
        )


def one_head_in_fp8_too(name: str, sizes: Sizes) -> Iterator[tuple[str, Sizes]]:
    """What to compile of a layer, by name: as it is, and one KV head in fp8, of which two tokens share words."""
    yield name, sizes
    if sizes["kv_heads"] == 1:
        yield f"{name}, fp8", sizes | {"dtype": "float8_e4m3fn"}

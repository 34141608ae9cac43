"""ragged_paged_attention: decode, prefill and both mixed, at the model shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pallas_kernels.cases.case import Arguments, Work, itemsize
from pallas_kernels.cases.numbers import random_array
from pallas_kernels.cases.pages import random_pages
from pallas_kernels.cases.steps import Step, rows_of, words
from pallas_kernels.layouts import attention_layout
from pallas_kernels.mask import MaskRule
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.shapes import SHAPES, AttentionShape
from scripts.kernel_bench.case import BenchCase, Sizes
from scripts.kernel_bench.shards import splits, with_most_shards

OP = "ragged_paged_attention"
KINDS = ("decode", "decode-long", "decode-32k", "prefill", "mixed")


@dataclass(frozen=True)
class Setting:
    """A shard of a model's layer and a step."""

    shape: AttentionShape
    num_q_heads: int
    num_kv_heads: int
    step: Step

    @property
    def options(self) -> dict[str, Any]:
        """Static options of the op."""
        return {
            "sm_scale": self.shape.sm_scale,
            "sliding_window": self.shape.sliding_window,
            "attention_chunk_size": self.shape.attention_chunk_size,
            "soft_cap": self.shape.soft_cap,
            "num_kv_heads": self.num_kv_heads,
        }


def cases(sizes: Sizes) -> Iterator[BenchCase]:
    """Every shape that splits so, each kind of step; 32k where a mask hides most of it."""
    for shape in SHAPES:
        hides = shape.sliding_window is not None or shape.attention_chunk_size is not None
        for kind in KINDS if splits(shape, sizes.shards) else ():
            if kind != "decode-32k" or hides:
                yield case(kind, shape, sizes)


def case(kind: str, shape: AttentionShape, sizes: Sizes) -> BenchCase:
    """One step of one shape."""
    mask = MaskRule(True, shape.sliding_window, shape.attention_chunk_size)
    step = Step(rows_of(kind, sizes.batch, sizes.context, sizes.small), mask, sizes.page)
    setting = Setting(shape, *shape.per_shard(sizes.shards), step)
    return BenchCase(
        OP,
        kind,
        shape.name,
        words(step.rows),
        sizes,
        work(setting, sizes),
        lambda seed: arguments(setting, sizes, seed),
        lambda backend, pages, rest: call(setting, backend, pages, rest),
        lambda: case(kind, shape, with_most_shards(shape, replace(sizes, small=True))),
        setting=setting,
        same=replace(setting.shape, name="", source=""),
    )


def work(setting: Setting, sizes: Sizes) -> Work:
    """K and V of each token seen, queries and outputs; two products of queries and keys, of weights and values."""
    head = setting.shape.head_dim
    entry_bytes = 2 * setting.num_kv_heads * head * itemsize(sizes.dtype)
    query_bytes = 2 * setting.num_q_heads * head * itemsize(sizes.q_dtype)
    num_bytes = setting.step.tokens_seen * entry_bytes + setting.step.num_tokens * query_bytes
    return Work(num_bytes, 4 * setting.step.pairs_seen * setting.num_q_heads * head)


def arguments(setting: Setting, sizes: Sizes, seed: int) -> Arguments:
    """Random pages in random order; rest: q, step, sinks."""
    rng = np.random.default_rng(seed)
    layout = attention_layout(
        num_kv_heads=setting.num_kv_heads,
        head_dim=setting.shape.head_dim,
        page_size=sizes.page,
        dtype=sizes.dtype,
        platform=sizes.platform,
    )
    pages = random_pages(rng, layout, setting.step.num_pages)
    q = random_array(rng, (setting.step.num_tokens, setting.num_q_heads, setting.shape.head_dim), sizes.q_dtype)
    sinks = random_array(rng, (setting.num_q_heads,), "float32") if setting.shape.sinks else None
    return Arguments(pages, (q, setting.step.arrays(rng), sinks))


def call(setting: Setting, backend: str, pages: Any, rest: Any) -> tuple[Any, tuple[()]]:
    """The op alone, no write of new KV."""
    q, step, sinks = rest
    result = ragged_paged_attention(q, pages, *step, sinks=sinks, backend=backend, **setting.options)
    return result.out, ()

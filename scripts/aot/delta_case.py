"""Cases of gated delta nets: a model of gated_delta_rule/shapes.py, one of its shards, a step's sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pallas_kernels.gated_delta_rule import gated_delta_rule
from pallas_kernels.gated_delta_rule.shapes import SHAPES, DeltaShape
from scripts.aot.arguments import argument
from scripts.aot.recurrent import model_settings, state_pool


@dataclass(frozen=True)
class DeltaCase:
    """Sizes of one compilation of gated_delta_rule."""

    model: str = "qwen3-next-80b-a3b"
    shards: int = 1
    tokens: int = 1024
    seqs: int = 64
    kept: int = 1  # states of a sequence: one and those of drafts
    dtype: str = "bfloat16"  # of the inputs but g and beta
    state_dtype: str = "float32"

    @property
    def shape(self) -> DeltaShape:
        """The model's layer."""
        return next(shape for shape in SHAPES if shape.name == self.model)


def rule(case: DeltaCase, backend: str = "tpu") -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """gated_delta_rule, with the states donated by its caller."""
    shape, (key_heads, heads) = case.shape, case.shape.per_shard(case.shards)
    of_key = argument((case.tokens, key_heads, shape.key_dim), case.dtype)
    v = argument((case.tokens, heads, shape.value_dim), case.dtype)
    beta = argument((case.tokens, heads), "float32")
    g = argument((case.tokens, heads, shape.key_dim), "float32") if shape.is_per_channel else beta
    states = state_pool(shape.state_shapes(case.shards)[1], case.state_dtype)
    sizes = ((case.seqs + 1,), (3,), (case.seqs,), (case.seqs, case.kept))
    step = (*(argument(size, "int32") for size in sizes), argument((case.seqs,), "bool"))

    def call(q: Any, states: Any, k: Any, v: Any, gates: Any, step: Any) -> Any:
        return gated_delta_rule(q, k, v, *gates, states, *step, use_qk_l2norm=True, backend=backend)

    return call, (of_key, states, of_key, v, (g, beta), step)


OPERATIONS = {"gated_delta_rule": (DeltaCase, rule)}
SHAPE_CASES = dict.fromkeys(OPERATIONS, partial(model_settings, SHAPES))

"""Cases of the recurrent layers: a model of ssm_update/shapes.py, one of its tensor-parallel shards, a step's sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from pallas_kernels.ssm_update import causal_conv1d, selective_scan
from pallas_kernels.ssm_update.shapes import SHAPES, SsmShape
from scripts.aot.arguments import argument
from scripts.aot.recurrent import model_settings, state_pool


@dataclass(frozen=True)
class SsmCase:
    """Sizes of one compilation of causal_conv1d or selective_scan."""

    model: str = "mamba2-2.7b"
    shards: int = 1
    tokens: int = 1024
    seqs: int = 64
    dtype: str = "bfloat16"  # of the inputs and of the convolution's states
    state_dtype: str = "float32"  # of the scan's
    kept: int = 1  # states of a sequence: one and those of drafts

    @property
    def shape(self) -> SsmShape:
        """The model's layer."""
        return next(shape for shape in SHAPES if shape.name == self.model)

    @property
    def step(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The arguments that describe a step."""
        ints = [argument(shape, "int32") for shape in ((self.seqs + 1,), (3,), (self.seqs,), (self.seqs, self.kept))]
        return (*ints, argument((self.seqs,), "bool"))


def conv(case: SsmCase, backend: str = "tpu") -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """causal_conv1d, with the states donated by its caller."""
    (channels, before), _ = case.shape.state_shapes(case.shards)
    states = state_pool((channels, before), case.dtype)
    weights = (argument((channels, before + 1), case.dtype), argument((channels,), case.dtype))

    def call(x: Any, states: Any, weight: Any, bias: Any, step: Any) -> Any:
        return causal_conv1d(x, states, weight, *step, bias=bias, backend=backend)

    return call, (argument((case.tokens, channels), case.dtype), states, *weights, case.step)


def scan(case: SsmCase, backend: str = "tpu") -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """selective_scan, with the states donated by its caller."""
    heads, groups = case.shape.per_shard(case.shards)
    head_dim, state_dim = case.shape.head_dim, case.shape.state_dim
    states = state_pool(case.shape.state_shapes(case.shards)[1], case.state_dtype)
    of_head = (case.tokens, heads)
    x, a, b = of_head, (heads, state_dim), (case.tokens, state_dim)
    if head_dim is not None:
        x, a, b = (*of_head, head_dim), (heads,), (case.tokens, groups, state_dim)
    inputs = [argument(shape, case.dtype) for shape in (of_head, b, b)]
    weights = [argument(shape, "float32") for shape in (a, (heads,), (heads,))]

    def call(x: Any, states: Any, inputs: Any, weights: Any, step: Any) -> Any:
        (dt, b, c), (a, d, bias) = inputs, weights
        return selective_scan(x, states, dt, a, b, c, *step, d=d, dt_bias=bias, backend=backend)

    return call, (argument(x, case.dtype), states, inputs, weights, case.step)


OPERATIONS = {"causal_conv1d": (SsmCase, conv), "selective_scan": (SsmCase, scan)}


SHAPE_CASES = dict.fromkeys(OPERATIONS, partial(model_settings, SHAPES))

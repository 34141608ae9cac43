"""How often jax traces a model: a step of known shapes is traced while it warms up, and then no more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import chex
import pytest
from flax import nnx


@contextmanager
def at_most_traced(model: type[nnx.Module], num_traces: int) -> Iterator[None]:
    """Inside the block a call of a `model` fails if jax has traced it `num_traces` times there already."""
    chex.clear_trace_counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "__call__", chex.assert_max_traces(model.__call__, n=num_traces))
        yield

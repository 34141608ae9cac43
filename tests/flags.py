"""jax's flags that an application may set, as a column of tests: under each the results are those without."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import jax

# By the name of the flag: a context in which it is set. The first ones are of tracing: what is traced stays the same.
OF_TRACING: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "jax_enable_x64": partial(jax.enable_x64, True),
    "jax_numpy_dtype_promotion": partial(jax.numpy_dtype_promotion, "strict"),
    "jax_numpy_rank_promotion": partial(jax.numpy_rank_promotion, "raise"),
    "jax_check_tracer_leaks": jax.checking_leaks,
}
FLAGS = OF_TRACING | {
    "jax_debug_nans": partial(jax.debug_nans, True),
    "jax_debug_infs": partial(jax.debug_infs, True),
    "jax_transfer_guard": partial(jax.transfer_guard, "disallow"),
    "jax_disable_jit": jax.disable_jit,
}
# Without `jit` XLA fuses nothing, so sums are rounded elsewhere.
ROUNDS_ELSEWHERE = frozenset({"jax_disable_jit"})

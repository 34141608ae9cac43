"""Sweep of merge_states, which XLA compiles on every platform: parts, sizes, sinks, NaN where a part saw nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.merge_states import merge_states
from tests.pallas_kernels.cases import assert_close
from tests.pallas_kernels.merge_states.test_merge_states import HEADS, attend, random_parts
from tests.pallas_kernels.on_tpu import compile_on_tpu
from tests.pallas_kernels.sweeps import choices, naming

FACTORS: dict[str, tuple[Any, ...]] = {
    "sizes": ([1], [0, 0], [4, 1], [3, 0, 9], [2] * 7, [30, 1]),
    "sinks": (None, [3.0, -np.inf, 90.0], [-np.inf] * HEADS, [-1e30, 0.0, 1e30]),
    "dtype": ("float32", "bfloat16"),
}


def tpu(seed: int) -> Iterator[None]:
    """Parts merged are attention over all keys; three sets of parts a choice."""
    for number, choice in choices(FACTORS, seed):
        sinks = None if choice["sinks"] is None else np.array(choice["sinks"])
        run = None
        for step in itertools.islice(itertools.count(10 * number), 3):
            logits, values = random_parts(step, choice["sizes"])
            parts = [attend(*part) for part in zip(logits, values, strict=True)]
            outs, lses = (np.stack([part[i] for part in parts]).astype(np.float32) for i in range(2))
            outs[lses == -np.inf] = np.nan
            arguments = (jnp.asarray(outs, choice["dtype"]), jnp.asarray(lses))

            def merge(outs, lses, sinks=sinks):  # type: ignore[no-untyped-def]
                given = None if sinks is None else jnp.asarray(sinks, jnp.float32)
                return merge_states(outs, lses, sinks=given, return_lse=True, backend="tpu")

            with naming(choice, step):
                run = run or compile_on_tpu(merge, *arguments)
                result = run(*arguments)
                whole = attend(np.concatenate(logits, axis=2), np.concatenate(values), sinks)
                assert_close(result.out, whole[0], choice["dtype"], "out")
                assert_close(result.lse, whole[1], "float32", "lse")
            yield


SWEEPS = {"tpu": tpu}

"""Sweep of kv_write on TPU: every pair of dtypes, sizes and scales, NaN in the pages' other slots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_write import kv_write
from pallas_kernels.layouts import KV_CACHE_DTYPES, attention_layout
from tests.pallas_kernels.cases import random_values, whole_rows
from tests.pallas_kernels.on_tpu import compile_on_tpu
from tests.pallas_kernels.oracle import by_token
from tests.pallas_kernels.sweeps import choices, naming

FACTORS: dict[str, tuple[Any, ...]] = {
    "dtype": tuple(name for name in KV_CACHE_DTYPES if name != "float16"),
    "page_size": (1, 5, 8, 16, 64, 256),
    "heads": (1, 2, 3, 8),
    "dim": (1, 64, 80, 128, 192),
    "tokens": (1, 7, 70),
    "num_pages": (2, 9),
    "scales": (None, "scalar", "per_head"),
    "new_dtype": ("bfloat16", "float32"),
}


def random_slots(rng: np.random.Generator, choice: dict[str, Any]) -> np.ndarray:
    """Different slots, page 0's too, in order (so that there are runs) or not, some skipped."""
    num_slots, tokens = choice["num_pages"] * choice["page_size"], choice["tokens"]
    first = int(rng.integers(0, num_slots))
    slots = np.arange(first, num_slots) if rng.integers(2) else rng.permutation(num_slots)
    slots = np.append(slots[:tokens], np.full(max(0, tokens - slots.size), -1))
    slots[rng.random(tokens) < rng.choice([0.0, 0.1, 0.5, 1.0])] = -1
    return slots.astype(np.int32)


def tpu(seed: int) -> Iterator[None]:
    """Bit for bit what the reference writes, four lists of slots a choice."""
    for number, choice in choices(FACTORS, seed):
        rng = np.random.default_rng(number)
        page_size = whole_rows(choice["page_size"], choice["heads"], choice["dtype"], "tpu")
        choice = {**choice, "page_size": page_size}
        (array,) = attention_layout(
            num_kv_heads=choice["heads"],
            head_dim=choice["dim"],
            page_size=choice["page_size"],
            dtype=choice["dtype"],
            platform="tpu",
        ).arrays
        scale_shape = {None: None, "scalar": (), "per_head": (choice["heads"],)}[choice["scales"]]
        scale = None if scale_shape is None else jnp.asarray(rng.uniform(0.3, 1.7, scale_shape), jnp.float32)

        def write(k, v, pages, slots, backend="tpu", scale=scale):  # type: ignore[no-untyped-def]
            return kv_write(k, v, pages, slots, k_scale=scale, v_scale=scale, backend=backend)

        run = None
        for step in range(4):
            values = random_values(rng, array.shape(choice["num_pages"]), choice["dtype"])
            values[1:] = 127 if choice["dtype"] == "int8" else np.nan
            values[0] = np.zeros((), values.dtype)
            size = (choice["tokens"], choice["heads"], choice["dim"])
            k, v = (jnp.asarray(random_values(rng, size, choice["new_dtype"])) for _ in range(2))
            arguments = (k, v, (jnp.asarray(values),), jnp.asarray(random_slots(rng, choice)))
            with naming(choice, step):
                run = run or compile_on_tpu(write, *arguments)
                slots = np.asarray(arguments[-1])
                slots = slots[slots >= choice["page_size"]]
                written = np.divmod(slots, choice["page_size"])
                reference = np.asarray(write(*arguments, backend="reference")[0])
                by_token(values, choice["heads"])[written] = by_token(reference, choice["heads"])[written]
                np.testing.assert_array_equal(run(*arguments)[0].view(np.uint8), values.view(np.uint8))
            yield


SWEEPS = {"tpu": tpu}

"""The least time that this machine can take for a workload: bytes of weights and caches by bandwidth, or flops.

Flow:    LanguageModel -> [MatrixSizes.of]; [MachineRates.measure] -> [floor_speeds] -> kvjax.bench.report

A step reads every matrix once, and a decoding step what its requests keep; each token is multiplied by each matrix.
The longer of the two is the floor. Attention's products, norms, sampling and the host count nothing, and both rates are
those of large arrays, so no engine reaches it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.bench.measure import Speed, Speeds
from kvjax.bench.workload import Workload
from kvjax.core import KVCacheSpec

_READ_BYTES, _SQUARE, _REPEATS = 256 << 20, 2048, 5


@dataclass(frozen=True)
class MatrixSizes:
    """Elements of the matrices that every token passes, and of the head, which the last token of a prompt passes."""

    layers: int
    head: int
    bytes_per_element: int

    @classmethod
    def of(cls, module: nnx.Module) -> Self | None:
        """Sizes of a model; None where it picks among experts or encodes, so that what a token passes differs."""
        sizes, itemsize = {"layers": 0, "head": 0, "embed": 0}, 1
        for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
            names, shape = [str(name) for name in path], variable.get_value().shape
            if "experts" in names or "encoder" in names:
                return None
            part = "head" if "lm_head" in names else "embed" if names[0].startswith("embed") else "layers"
            if len(shape) >= 2:
                sizes[part] += math.prod(shape)
                itemsize = variable.get_value().dtype.itemsize
        return cls(sizes["layers"], sizes["head"] or sizes["embed"], itemsize)


@dataclass(frozen=True)
class MachineRates:
    """What the machine's device does at best. `cpu` is cores at work meanwhile: process time by the clock's."""

    bytes_per_s: float
    flops_per_s: float
    cpu: float

    @classmethod
    def measure(cls, dtype: str) -> Self:
        """Reads 256 MiB and multiplies two matrices of 2,048 x 2,048 of a dtype: the best of five times each."""
        numbers = jnp.ones(_READ_BYTES // jnp.dtype(dtype).itemsize, dtype)
        square = jnp.ones((_SQUARE, _SQUARE), dtype)
        read_s, _ = _best_s(jax.jit(lambda x: jnp.max(x)), numbers)
        multiply_s, cpu_s = _best_s(jax.jit(lambda x: x @ x), square)
        return cls(numbers.nbytes / read_s, 2 * _SQUARE**3 / multiply_s, max(cpu_s / multiply_s, 1.0))


def floor_speeds(
    workload: Workload,
    sizes: MatrixSizes,
    specs: Iterable[KVCacheSpec],  # of every layer that has a cache
    rates: MachineRates,
    max_step_tokens: int,
) -> Speeds:
    """Speeds at the floor, where the prompts come in full steps of `max_step_tokens`."""
    batch, num_prompt_tokens = len(workload.prompts), sum(map(len, workload.prompts))
    num_steps = workload.num_new_tokens - 1
    num_decoded = batch * num_steps
    mean_length = num_prompt_tokens // batch + num_steps // 2
    kept = sum(spec.max_blocks_per_request(mean_length, 1) * spec.page_size_bytes for spec in specs)
    weights = (sizes.layers + sizes.head) * sizes.bytes_per_element

    def phase(num_tokens: int, num_heads: int, read_bytes: int) -> Speed:
        flops = 2 * (sizes.layers * num_tokens + sizes.head * num_heads)
        seconds = max(read_bytes / rates.bytes_per_s, flops / rates.flops_per_s)
        return Speed(num_tokens, seconds, seconds * rates.cpu)

    prefill = phase(num_prompt_tokens, batch, math.ceil(num_prompt_tokens / max_step_tokens) * weights)
    decode = phase(num_decoded, num_decoded, num_steps * (weights + batch * kept))
    total = Speed(prefill.tokens + decode.tokens + batch, prefill.wall_s + decode.wall_s, prefill.cpu_s + decode.cpu_s)
    return Speeds(prefill, decode, total, tokens=[])


def _best_s(compute: Callable[[Any], jax.Array], argument: jax.Array) -> tuple[float, float]:
    """The least seconds by the clock of some calls, with that call's process time; one call before compiles."""
    jax.block_until_ready(compute(argument))
    times = []
    for _ in range(_REPEATS):
        wall, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(compute(argument))
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    return min(times)

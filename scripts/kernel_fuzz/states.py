"""Trials of ops with recurrent states: causal_conv1d, selective_scan (Mamba 1 and 2) and gated_delta_rule.

Oracles: the recurrences token by token in float64 (tests/pallas_kernels/ssm_update/ssm_cases.py, delta_cases.py).
NaN in padding tokens and in pages that nobody starts from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_delta_rule import gpu_rule, tpu_rule, xla_rule
from pallas_kernels.gated_delta_rule import reference as delta_reference
from pallas_kernels.gated_delta_rule.arguments import Inputs, Options
from pallas_kernels.ssm_update import gpu_conv, gpu_scan, reference, tpu_conv, tpu_scan, xla_scan
from pallas_kernels.ssm_update.arguments import Convolution, Scan
from pallas_kernels.ssm_update.triton_scan import Sizes
from pallas_kernels.state_step import StepArrays
from scripts.kernel_fuzz.trials import checked, compiled_on, hard_counts, one_of
from tests.pallas_kernels.gated_delta_rule import delta_cases
from tests.pallas_kernels.ssm_update.ssm_cases import ConvSizes, assert_conv
from tests.pallas_kernels.ssm_update.test_selective_scan import Shape as ScanShape
from tests.pallas_kernels.state_cases import on_device

_STEPS = 3
_CONVOLUTIONS: dict[str, Any] = {"reference": reference, "tpu": tpu_conv, "gpu": gpu_conv}
_SCANS: dict[str, Any] = {"reference": reference, "xla": xla_scan, "tpu": tpu_scan, "gpu": gpu_scan, "triton": xla_scan}
_RULES: dict[str, Any] = {"reference": delta_reference, "xla": xla_rule, "tpu": tpu_rule, "gpu": gpu_rule}


def convolution(rng: np.random.Generator, platform: str) -> Iterator[str]:
    """Steps of one shape of causal_conv1d."""
    channels = one_of(rng, [1, 24, 256]) if platform == "reference" else one_of(rng, [128, 256])
    tokens, kept = one_of(rng, [1, 5, 24, 70]), one_of(rng, [1, 3])
    if platform == "gpu":
        tokens = min(tokens, 24)
    sizes = ConvSizes(tokens, num_rows=6, num_pages=30, channels=channels, num_kept=kept)
    taps, has_bias = one_of(rng, [2, 3, 4, 9]), bool(rng.integers(2))
    dtype, activation = one_of(rng, ["float32", "bfloat16"]), one_of(rng, [None, "silu"])
    own: dict[str, Any] = {"tpu": {"chunk": one_of(rng, [32, 64])}, "gpu": {"piece": 9}}.get(platform, {})

    def call(x: Any, states: Any, weight: Any, bias: Any, step: Any) -> Any:
        module = _CONVOLUTIONS[platform]
        return module.causal_conv1d(
            Convolution(x, weight, bias), states, StepArrays(*step).by_column(), activation=activation, **own
        )

    *arrays, step = sizes.make(rng, [], taps, dtype, has_bias)
    run = compiled_on(platform, rng, call, *arrays, on_device(step))
    for _ in range(_STEPS):
        counts = hard_counts(rng, tokens, 6, (taps, 9, 32))

        def check(counts: Any = counts) -> None:
            inputs = sizes.make(rng, counts, taps, dtype, has_bias)
            assert_conv(run(*inputs[:-1], on_device(inputs[-1])), inputs, dtype, activation)

        yield checked((sizes, taps, dtype, has_bias, activation, counts), check)


def _scan_shape(rng: np.random.Generator, platform: str) -> ScanShape:
    is_mamba1 = bool(rng.integers(2))
    tokens, kept = one_of(rng, [1, 9, 40, 130]), one_of(rng, [1, 1, 3])
    dtype, state_dtype = one_of(rng, ["float32", "bfloat16"]), one_of(rng, ["float32", "bfloat16"])
    limit = one_of(rng, [(0.0, float("inf")), (0.0, 3.0)])
    if platform == "gpu":
        heads, head_dim, state_dim, groups = (
            (64, None, one_of(rng, [8, 16]), 1) if is_mamba1 else one_of(rng, [(4, 16, 64, 2), (2, 32, 32, 1)])
        )
        tokens = min(tokens, 12)
    elif platform == "tpu":
        heads, head_dim, state_dim, groups = (
            (128, None, 8, 1) if is_mamba1 else one_of(rng, [(4, 64, 128, 2), (4, 32, 128, 1), (16, 8, 128, 1)])
        )
        tokens = min(tokens, 40) if is_mamba1 else tokens
    else:
        heads, head_dim, state_dim, groups = (
            (6, None, 4, 1) if is_mamba1 else one_of(rng, [(6, 3, 4, 2), (80, 64, 128, 1), (1, 1, 1, 1)])
        )
    return ScanShape(heads, head_dim, state_dim, groups, tokens, dtype, state_dtype, limit, kept)


def scan(rng: np.random.Generator, platform: str) -> Iterator[str]:
    """Steps of one shape of selective_scan."""
    shape = _scan_shape(rng, platform)
    own: dict[str, Any] = {"by_triton": Sizes(one_of(rng, [16, 32]))} if platform == "triton" else {}

    def call(arrays: Any, step: Any) -> Any:
        given = Scan(*(arrays[name] for name in Scan._fields))
        module, steps = _SCANS[platform], StepArrays(*step).by_column()
        return module.selective_scan(given, arrays["states"], steps, dt_limit=shape.limit, **own)

    rows, pages = 6, 16
    arrays, step = shape.make(rng, [], rows, pages)
    run = compiled_on(platform, rng, call, _as_jax(arrays), on_device(step))
    for _ in range(_STEPS):
        counts = hard_counts(rng, shape.num_tokens, rows, (4, 6, 16, 64, 128))

        def check(counts: Any = counts) -> None:
            arrays, step = shape.make(rng, counts, rows, pages)
            shape.assert_right(run(_as_jax(arrays), on_device(step)), arrays, step)

        yield checked((shape, counts), check)


def delta(rng: np.random.Generator, platform: str) -> Iterator[str]:
    """Steps of one shape of gated_delta_rule."""
    plain = [(2, 4, 4, 3), (1, 3, 1, 1), (2, 2, 16, 16)]
    sizes = {
        "reference": plain,
        "xla": plain,
        "tpu": [(1, 2, 128, 128), (2, 2, 128, 128)],
        "gpu": [(1, 2, 16, 64), (2, 2, 16, 32), (1, 3, 32, 32)],
    }
    key_heads, value_heads, key_dim, value_dim = one_of(rng, sizes[platform])
    shape = delta_cases.Shape(
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        is_per_channel=bool(rng.integers(2)),
        num_tokens=12 if platform == "gpu" else one_of(rng, [1, 9, 76]),
        num_kept=one_of(rng, [1, 1, 3]),
        dtype=one_of(rng, ["float32", "bfloat16"]),
        state_dtype=one_of(rng, ["float32", "bfloat16"]),
        use_qk_l2norm=bool(rng.integers(2)),
        num_pages=30,
    )
    options = Options(shape.scale, shape.use_qk_l2norm)

    def call(arrays: Any, step: Any) -> Any:
        inputs = Inputs(*(arrays[name] for name in delta_cases.INPUTS))
        module = _RULES[platform]
        return module.gated_delta_rule(inputs, arrays["states"], StepArrays(*step).by_column(), options=options)

    arrays, step = shape.make(rng, [])
    run = compiled_on(platform, rng, call, _as_jax(arrays), on_device(step))
    for _ in range(_STEPS):
        counts = hard_counts(rng, shape.num_tokens, shape.num_rows, (4, 16, 64))

        def check(counts: Any = counts) -> None:
            arrays, step = shape.make(rng, counts)
            shape.assert_right(run(_as_jax(arrays), on_device(step)), arrays, step)

        yield checked((shape, counts), check)


def _as_jax(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: jnp.asarray(array) for name, array in arrays.items()}

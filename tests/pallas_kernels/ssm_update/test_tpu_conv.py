"""The TPU kernel of causal_conv1d against a loop over tokens: ragged steps, NaN wherever nobody may look, races."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.interpret.on_tpu import compile_on_tpu
from pallas_kernels.ssm_update import causal_conv1d, tpu_conv
from pallas_kernels.ssm_update.arguments import Convolution
from pallas_kernels.state_step import StepArrays
from tests.pallas_kernels.ssm_update.ssm_cases import ConvSizes, assert_conv
from tests.pallas_kernels.state_cases import on_device, random_step

NUM_TOKENS, CHUNK = 70, 32
SIZES = ConvSizes(NUM_TOKENS, num_rows=6, num_pages=30, channels=1152, num_kept=3)
LENGTHS = (
    [1, 1, 1, 1, 1, 1],
    [1, 0, 1, 45, 2, 3],  # a sequence over two borders of chunks, others that begin beside each other
    [],
    [0, 31, 1, 1, 2, 34],  # a border inside the first inputs of a sequence
    [70],
)


@functools.cache
def compiled(taps: int, dtype: str, has_bias: bool, activation: str | None) -> Callable[..., Any]:
    """(x, states, weight, bias, step) -> (out, states)."""
    inputs = SIZES.make(np.random.default_rng(0), [], taps, dtype, has_bias)

    def call(x: Any, states: Any, weight: Any, bias: Any, step: Any) -> Any:
        arguments = Convolution(x, weight, bias)
        return tpu_conv.causal_conv1d(arguments, states, StepArrays(*step), activation=activation, chunk=CHUNK)

    return compile_on_tpu(call, *inputs[:-1], on_device(inputs[-1]))


@pytest.mark.parametrize(
    ("taps", "dtype", "has_bias", "activation"),
    [
        (4, "bfloat16", True, "silu"),
        (3, "float32", False, None),
        pytest.param(2, "bfloat16", False, "silu", marks=pytest.mark.sweep),
        pytest.param(9, "float32", True, "silu", marks=pytest.mark.sweep),
    ],
)
def test_equals_a_loop_over_tokens(taps: int, dtype: str, has_bias: bool, activation: str | None) -> None:
    """Decode, mixed and prefill; lengths 0, 1 and shorter than the state; states in place and elsewhere."""
    run = compiled(taps, dtype, has_bias, activation)
    for seed, q_lens in enumerate(LENGTHS):
        rng = np.random.default_rng(seed)
        *arrays, step = inputs = SIZES.make(rng, q_lens, taps, dtype, has_bias)
        assert_conv(run(*arrays, on_device(step)), inputs, dtype, activation)
        mixed = step._replace(distribution=np.array([0, 0, len(q_lens)], np.int32))  # may call every sequence mixed
        assert_conv(run(*arrays, on_device(mixed)), inputs, dtype, activation)


def test_what_is_not_finite_stays_in_its_sequence() -> None:
    """A sequence whose inputs are NaN changes no bit of those beside it in its chunk."""
    inputs = SIZES.make(np.random.default_rng(7), [1, 9, 3, 30, 2], 3, "float32", False)
    run = compiled(3, "float32", False, None)
    x, *others, step = inputs
    clean = run(x, *others, on_device(step))[0]
    for row in range(5):
        dirty = x.copy()
        dirty[step.tokens(row)] = np.nan
        out = run(dirty, *others, on_device(step))[0]
        assert np.isnan(out[step.tokens(row)]).all()
        kept = np.setdiff1d(np.arange(45), np.arange(NUM_TOKENS)[step.tokens(row)])
        np.testing.assert_array_equal(out[kept], clean[kept])


BAD: dict[str, tuple[tuple[int, int], str, str]] = {
    "channels": ((136, 4), "float32", "channels in multiples of 128, got 136"),
    "taps": ((128, 10), "float32", "up to 9 taps, got 10"),
    "float16": ((128, 4), "float16", "no arithmetic on float16"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_the_kernel_cannot_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """backend="tpu" refuses; "auto" on a TPU warns and gives what the reference gives."""
    (channels, taps), dtype, message = BAD[name]
    x, states = jnp.ones((3, channels), dtype), jnp.zeros((4, channels, taps - 1), dtype)
    step = on_device(random_step(np.random.default_rng(0), [3], 1, 4))
    arguments = (x, states, jnp.ones((channels, taps)), *step)
    with pytest.raises(NotImplementedError, match=f"causal_conv1d: .*{message}"):
        causal_conv1d(*arguments, backend="tpu")
    expected = causal_conv1d(*arguments, backend="reference")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.warns(RuntimeWarning, match="the reference runs instead"):
        result = causal_conv1d(*arguments)
    np.testing.assert_array_equal(result.out, expected.out)


def test_the_op_takes_the_kernel_on_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "auto" there, and "tpu" anywhere, trace the kernel."""
    arguments = (jnp.ones((20, 128)), jnp.zeros((9, 128, 3)), jnp.ones((128, 4)))
    step = on_device(random_step(np.random.default_rng(0), [20], 1, 9))

    def traced(backend: str) -> bool:
        call = functools.partial(causal_conv1d, backend=backend)
        return "conv1d_c32" in str(jax.make_jaxpr(call)(*arguments, *step))

    assert traced("tpu")
    assert not traced("auto")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert traced("auto")

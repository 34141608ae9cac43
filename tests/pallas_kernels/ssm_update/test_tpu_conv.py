"""The TPU kernel of causal_conv1d: sequences apart from each other, what it cannot do, when the op takes it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cases.states import as_arguments, on_device, random_step
from pallas_kernels.interpret.on_tpu import compile_on_tpu
from pallas_kernels.ssm_update import causal_conv1d
from pallas_kernels.ssm_update.cases import ConvCase

CASE = ConvCase(
    tokens=70,
    seqs=6,
    kept=3,
    num_pages=30,
    q_dtype="float32",
    channels=1152,
    taps=3,
    has_bias=0,
    activation="",
    chunk=32,
)


def test_what_is_not_finite_stays_in_its_sequence() -> None:
    """A sequence whose inputs are NaN changes no bit of those beside it in its chunk."""
    arrays, step = CASE.step(np.random.default_rng(7), [1, 9, 3, 30, 2])
    run = compile_on_tpu(partial(CASE.call, "tpu"), *as_arguments(arrays, step))
    clean = run(*as_arguments(arrays, step)).outs
    for row in range(5):
        dirty = arrays | {"x": arrays["x"].copy()}
        dirty["x"][step.tokens(row)] = np.nan
        out = run(*as_arguments(dirty, step)).outs
        assert np.isnan(out[step.tokens(row)]).all()
        kept = np.setdiff1d(np.arange(45), np.arange(CASE.tokens)[step.tokens(row)])
        np.testing.assert_array_equal(out[kept], clean[kept])


def test_checkpoints_are_left_on_the_way() -> None:
    """At any lengths, also where a state still has inputs of the initial one."""
    case = replace(CASE, checkpoints=3, num_pages=60)
    run = compile_on_tpu(partial(case.call, "tpu"), *as_arguments(*case.step(np.random.default_rng(0), [])))
    for seed, q_lens in enumerate([[1, 9, 3, 30, 2], [1, 1, 60], [4, 4, 4, 4, 4, 4]]):
        arrays, step = case.step(np.random.default_rng(seed), q_lens)
        arguments = as_arguments(arrays, step)
        case.assert_right(run(*arguments), arguments)


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
        call = partial(causal_conv1d, backend=backend)
        return "conv1d_c32" in str(jax.make_jaxpr(call)(*arguments, *step))

    assert traced("tpu")
    assert not traced("auto")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert traced("auto")

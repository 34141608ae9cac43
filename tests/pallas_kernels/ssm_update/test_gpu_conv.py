"""The GPU kernel of causal_conv1d: sequences and pieces apart, what it cannot do, when the op takes it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cases.states import as_arguments, on_device, random_step
from pallas_kernels.gpu import mosaic
from pallas_kernels.interpret.on_gpu import compile_on_gpu
from pallas_kernels.ssm_update import causal_conv1d, gpu_conv
from pallas_kernels.ssm_update.cases import ConvCase
from pallas_kernels.ssm_update.gpu_conv import Field
from pallas_kernels.ssm_update.shapes import SHAPES as MODELS
from pallas_kernels.state_step import StateStep, StepArrays

NUM_TOKENS, NUM_ROWS, PIECE = 24, 5, 9
CASE = ConvCase(
    tokens=NUM_TOKENS, seqs=NUM_ROWS, num_pages=12, state_dtype="bfloat16", channels=256, has_bias=1, chunk=PIECE
)


def test_what_is_not_finite_stays_in_its_sequence() -> None:
    """A sequence whose inputs are NaN changes no bit of those beside it."""
    arrays, step = CASE.step(np.random.default_rng(7), [1, 5, 3, 12, 2])
    run = compile_on_gpu(partial(CASE.call, "gpu"), *as_arguments(arrays, step))
    clean = run(*as_arguments(arrays, step)).outs
    dirty = arrays | {"x": arrays["x"].copy()}
    dirty["x"][step.tokens(3)] = np.nan
    out = run(*as_arguments(dirty, step)).outs
    assert np.isnan(out[step.tokens(3)].astype(np.float32)).all()
    kept = np.setdiff1d(np.arange(23), np.arange(NUM_TOKENS)[step.tokens(3)])
    np.testing.assert_array_equal(out[kept], clean[kept])


@pytest.mark.parametrize("kept", [1, 3])
def test_checkpoints_are_left_on_the_way(kept: int) -> None:
    """At any lengths, also where a state still has inputs of the initial one."""
    case = replace(CASE, kept=kept, checkpoints=3, num_pages=50)
    run = compile_on_gpu(partial(case.call, "gpu"), *as_arguments(*case.step(np.random.default_rng(0), [])))
    for seed, q_lens in enumerate([[1, 5, 3, 12, 2], [24], [1, 1, 22], [4, 4, 4, 4, 4]]):
        arguments = as_arguments(*case.step(np.random.default_rng(seed), q_lens))
        case.assert_right(run(*arguments), arguments)


def test_pieces_do_not_wait_for_each_other() -> None:
    """All tokens are in one piece; who writes a page is the only one that reads it."""
    rng = np.random.default_rng(0)

    @jax.jit
    def pieces(arrays: StepArrays) -> jax.Array:
        return gpu_conv.pieces(StateStep.of(NUM_TOKENS, arrays), NUM_TOKENS, PIECE)

    for q_lens in ([1, 0, 1, 12, 2], [], [24], [2, 19, 1]):
        step = random_step(rng, q_lens, NUM_ROWS, num_pages=30, num_kept=3)
        table = np.asarray(pieces(StepArrays(*on_device(step))))
        table = table[table[:, Field.COUNT] > 0]
        tokens = [t for row in table for t in range(row[Field.TOKEN], row[Field.TOKEN] + row[Field.COUNT])]
        assert sorted(tokens) == list(range(NUM_TOKENS))
        pages = table[:, Field.WRITE :]
        assert sorted(pages[pages > 0]) == step.written
        for row in table:
            readers = table[(table[:, Field.READ] > 0) & np.isin(table[:, Field.READ], row[Field.WRITE :])]
            assert (readers[:, Field.TOKEN] == row[Field.TOKEN]).all()


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
def test_all_models_are_supported(model: Any, num_shards: int) -> None:
    channels, before = model.state_shapes(num_shards)[0]
    shapes = ((7, channels), (9, channels, before), (channels, before + 1))
    assert gpu_conv.reason_not_supported(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)) is None


BAD: dict[str, tuple[tuple[int, int], str]] = {
    "channels": ((136, 4), "channels in multiples of 128, got 136"),
    "taps": ((128, 10), "up to 9 taps, got 10"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_the_kernel_cannot_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """backend="gpu" refuses; "auto" on a GPU warns and gives what the reference gives."""
    (channels, taps), message = BAD[name]
    x, states = jnp.ones((3, channels)), jnp.zeros((4, channels, taps - 1))
    step = on_device(random_step(np.random.default_rng(0), [3], 1, 4))
    arguments = (x, states, jnp.ones((channels, taps)), *step)
    with pytest.raises(NotImplementedError, match=f"causal_conv1d: GPU kernels take {message}"):
        causal_conv1d(*arguments, backend="gpu")
    expected = causal_conv1d(*arguments, backend="reference")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(mosaic, "reason_without_hopper", lambda: None)
    with pytest.warns(RuntimeWarning, match="the reference runs instead"):
        result = causal_conv1d(*arguments)
    np.testing.assert_array_equal(result.out, expected.out)


def test_the_op_takes_the_kernel_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "auto" there, and "gpu" anywhere, trace the kernel."""
    arguments = (jnp.ones((20, 128)), jnp.zeros((9, 128, 3)), jnp.ones((128, 4)))
    step = on_device(random_step(np.random.default_rng(0), [20], 1, 9))

    def traced(backend: str) -> bool:
        call = partial(causal_conv1d, backend=backend)
        return "conv1d_w4" in str(jax.make_jaxpr(call)(*arguments, *step))

    assert traced("gpu")
    assert not traced("auto")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(mosaic, "reason_without_hopper", lambda: None)
    assert traced("auto")

"""The GPU kernel of causal_conv1d against a loop over tokens: ragged steps, NaN wherever nobody may look, races."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gpu import mosaic
from pallas_kernels.interpret.on_gpu import compile_on_gpu
from pallas_kernels.ssm_update import causal_conv1d, gpu_conv
from pallas_kernels.ssm_update.arguments import Convolution
from pallas_kernels.ssm_update.gpu_conv import Field
from pallas_kernels.ssm_update.shapes import SHAPES as MODELS
from pallas_kernels.state_step import StateStep, StepArrays
from tests.pallas_kernels.ssm_update.ssm_cases import ConvSizes, assert_conv
from tests.pallas_kernels.state_cases import on_device, random_step

NUM_TOKENS, NUM_ROWS, NUM_PAGES, PIECE = 24, 5, 12, 9
SIZES = ConvSizes(NUM_TOKENS, NUM_ROWS, NUM_PAGES, channels=256)
DRAFTS = ConvSizes(NUM_TOKENS, NUM_ROWS, num_pages=30, channels=128, num_kept=4)
# Shorter than the state, in one piece and in several; nothing; no padding.
LENGTHS = ([1, 0, 1, 12, 2], [], [24])


@functools.cache
def compiled(
    taps: int, dtype: str, has_bias: bool, activation: str | None, sizes: ConvSizes = SIZES
) -> Callable[..., Any]:
    """(x, states, weight, bias, step) -> (out, states)."""
    inputs = sizes.make(np.random.default_rng(0), [], taps, dtype, has_bias)

    def call(x: Any, states: Any, weight: Any, bias: Any, step: Any) -> Any:
        arguments = Convolution(x, weight, bias)
        return gpu_conv.causal_conv1d(arguments, states, StepArrays(*step), activation=activation, piece=PIECE)

    return compile_on_gpu(call, *inputs[:-1], on_device(inputs[-1]))


def assert_right(
    variant: tuple[int, str, bool, str | None], seed: int, q_lens: Sequence[int], sizes: ConvSizes = SIZES
) -> None:
    taps, dtype, has_bias, activation = variant
    inputs = sizes.make(np.random.default_rng(seed), q_lens, taps, dtype, has_bias)
    result = compiled(*variant, sizes)(*inputs[:-1], on_device(inputs[-1]))
    assert_conv(result, inputs, dtype, activation)


VARIANTS = [(4, "bfloat16", True, "silu"), (3, "float32", False, None)]
SWEEP = [*VARIANTS, (2, "float16", False, "silu"), (9, "float32", True, "silu")]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_equals_a_loop_over_tokens(variant: tuple[int, str, bool, str | None]) -> None:
    """Decode, mixed and prefill; lengths 0, 1 and shorter than the state; states in place and elsewhere."""
    for seed, q_lens in enumerate(LENGTHS if variant == VARIANTS[0] else LENGTHS[:1]):
        assert_right(variant, seed, q_lens)


def test_states_after_drafts() -> None:
    """Each of the last tokens may have a page, in sequences shorter than that, than the state, and of many pieces."""
    for seed, q_lens in enumerate(([1, 4, 2, 0, 3], [1, 2, 20])):
        assert_right(VARIANTS[0], seed, q_lens, DRAFTS)


@pytest.mark.sweep
@pytest.mark.parametrize("sizes", [SIZES, DRAFTS], ids=["last", "drafts"])
@pytest.mark.parametrize("variant", SWEEP, ids=str)
def test_sweep(variant: tuple[int, str, bool, str | None], sizes: ConvSizes) -> None:
    """Random lengths."""
    rng = np.random.default_rng(0)
    for seed in range(6):
        cuts = np.sort(rng.integers(0, NUM_TOKENS + 1, int(rng.integers(1, NUM_ROWS + 1))))
        assert_right(variant, seed, sorted(np.diff(cuts, prepend=0).tolist(), key=lambda n: n > 1), sizes)


def test_what_is_not_finite_stays_in_its_sequence() -> None:
    """A sequence whose inputs are NaN changes no bit of those beside it; `distribution` may call all of them mixed."""
    inputs = SIZES.make(np.random.default_rng(7), [1, 5, 3, 12, 2], *VARIANTS[0][:3])
    run = compiled(*VARIANTS[0])
    x, *others, step = inputs
    step = step._replace(distribution=np.array([0, 0, 5], np.int32))
    clean = run(x, *others, on_device(step))[0]
    dirty = x.copy()
    dirty[step.tokens(3)] = np.nan
    out = run(dirty, *others, on_device(step))[0]
    assert np.isnan(out[step.tokens(3)].astype(np.float32)).all()
    kept = np.setdiff1d(np.arange(23), np.arange(NUM_TOKENS)[step.tokens(3)])
    np.testing.assert_array_equal(out[kept], clean[kept])


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
        call = functools.partial(causal_conv1d, backend=backend)
        return "conv1d_w4" in str(jax.make_jaxpr(call)(*arguments, *step))

    assert traced("gpu")
    assert not traced("auto")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(mosaic, "reason_without_hopper", lambda: None)
    assert traced("auto")

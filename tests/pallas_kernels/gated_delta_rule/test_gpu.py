"""The GPU kernel of gated_delta_rule against numpy's recurrence: ragged steps, NaN wherever nobody may look, races."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cases import states
from pallas_kernels.cases.states import Arrays, Step
from pallas_kernels.gated_delta_rule import gated_delta_rule, gpu_rule
from pallas_kernels.gated_delta_rule.arguments import Inputs, Options
from pallas_kernels.gated_delta_rule.cases import DeltaCase
from pallas_kernels.gated_delta_rule.oracle import INPUTS
from pallas_kernels.gated_delta_rule.shapes import SHAPES as MODELS
from pallas_kernels.gpu import mosaic
from pallas_kernels.interpret.on_gpu import compile_on_gpu
from pallas_kernels.state_step import StepArrays
from tests.pallas_kernels.cases import assert_close
from tests.pallas_kernels.gated_delta_rule.test_gated_delta_rule import small

NUM_TOKENS = 12
# Beside others and alone; trips of tokens loaded together and tokens more; nothing but padding; no padding.
LENGTHS = ([1, 0, 1, 8], [], [2, 10])
SCALAR = small(1, 2, 16, 64, tokens=NUM_TOKENS, q_dtype="bfloat16")
CHANNEL = small(2, 2, 16, 32, True, tokens=NUM_TOKENS, l2norm=0)
DRAFTS = small(1, 3, 32, 32, tokens=NUM_TOKENS, kept=3, num_pages=20)
DECODE = small(1, 2, 16, 64, tokens=5, q_dtype="bfloat16", state_dtype="bfloat16")  # no token is loaded ahead
SHAPES = [SCALAR, CHANNEL, DRAFTS, DECODE]


@functools.cache
def compiled(shape: DeltaCase) -> Callable[..., Any]:
    """(arrays, step) -> (out, states)."""

    def rule(arrays: dict[str, Any], step: Any) -> Any:
        inputs = Inputs(*(arrays[name] for name in INPUTS))
        options = Options(shape.scale, bool(shape.l2norm))
        return gpu_rule.gated_delta_rule(inputs, arrays["states"], StepArrays(*step), options=options)

    return compile_on_gpu(rule, *on_device(*shape.step(np.random.default_rng(0), [])))


def on_device(arrays: Arrays, step: Step) -> tuple[dict[str, jax.Array], tuple[jax.Array, ...]]:
    return {name: jnp.asarray(array) for name, array in arrays.items()}, states.on_device(step)


@pytest.mark.parametrize("shape", [SCALAR, DRAFTS], ids=["plain", "drafts"])
def test_checkpoints_are_left_on_the_way(shape: DeltaCase) -> None:
    """Within tokens loaded together and after them."""
    shape = dataclasses.replace(shape, checkpoints=3, num_pages=40)
    for seed, q_lens in enumerate([[1, 0, 1, 8], [2, 10], [12]]):
        arrays, step = shape.step(np.random.default_rng(seed), q_lens)
        shape.assert_step(compiled(shape)(*on_device(arrays, step)), arrays, step)


def test_what_is_not_finite_stays_in_its_sequence() -> None:
    """A sequence whose inputs are not finite changes no bit of the others."""
    run = compiled(CHANNEL)
    arrays, step = CHANNEL.step(np.random.default_rng(5), [1, 2, 6])
    out, states = run(*on_device(arrays, step))
    tokens = step.tokens(1)
    dirty = {name: array.copy() for name, array in arrays.items()}
    for name, value in (("k", np.nan), ("q", np.inf), ("g", np.inf), ("v", np.inf)):
        dirty[name][tokens.start] = value
    got, after = run(*on_device(dirty, step))
    others = np.setdiff1d(np.arange(9), np.arange(NUM_TOKENS)[tokens])
    np.testing.assert_array_equal(got[others], out[others])
    pages = np.setdiff1d(np.arange(CHANNEL.num_pages), step.state_write[1])
    np.testing.assert_array_equal(after[pages], states[pages])
    assert np.isnan(got[tokens]).any()


@pytest.mark.parametrize("shape", [SCALAR, CHANNEL], ids=["scalar", "channel"])
def test_a_decay_to_nothing(shape: DeltaCase) -> None:
    """g of minus infinity forgets everything before."""
    arrays, step = shape.step(np.random.default_rng(4), [2, 8])
    arrays["g"][[1, 5]] = -np.inf
    shape.assert_step(compiled(shape)(*on_device(arrays, step)), arrays, step)


def test_the_split_of_rows_does_not_matter() -> None:
    """`distribution` may call every sequence mixed; a row without a page to write computes its outputs all the same."""
    arrays, step = SCALAR.step(np.random.default_rng(6), [1, 5])
    unwritten = step._replace(distribution=np.array([0, 0, 2], np.int32), state_write=np.zeros_like(step.state_write))
    out, states = compiled(SCALAR)(*on_device(arrays, unwritten))
    assert_close(out, SCALAR.oracle(arrays, step)[0], "bfloat16", "out")
    assert states.tobytes() == arrays["states"].tobytes()


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_tiles_are_wide_where_sequences_have_one_token(model: Any) -> None:
    """(columns, tokens loaded together): what registers hold."""
    key_heads, heads = model.per_shard(4)

    def tile(num_tokens: int) -> tuple[int, int]:
        shape = (num_tokens, heads, model.value_dim)
        found = gpu_rule._Tile.of(shape, model.key_dim, key_heads, 64, model.is_per_channel)
        return found.columns, found.num_tokens

    assert [tile(num_tokens) for num_tokens in (64, 65)] == [(64, 1), (32, 4)]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
def test_all_models_are_supported(model: Any, num_shards: int) -> None:
    key_heads, heads = model.per_shard(num_shards)
    gates = (7, heads, model.key_dim) if model.is_per_channel else (7, heads)
    shapes = (
        (7, heads, model.value_dim),
        (7, key_heads, model.key_dim),
        gates,
        (9, *model.state_shapes(num_shards)[1]),
    )
    assert gpu_rule.reason_not_supported(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)) is None


BAD = {
    "key": (small(1, 1, 24, 64, tokens=3), "keys in multiples of 16 up to 256 numbers, got 24"),
    "long_key": (small(1, 1, 272, 64, tokens=3), "keys in multiples of 16 up to 256 numbers, got 272"),
    "value": (small(1, 1, 16, 48, tokens=3), "values in multiples of 32 numbers, got 48"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_the_kernel_cannot_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """backend="gpu" refuses; "auto" on a GPU warns and gives what vectorised XLA gives."""
    shape, message = BAD[name]
    arrays, step = shape.step(np.random.default_rng(0), [1, 2])
    arguments = (*(jnp.asarray(arrays[n]) for n in (*INPUTS, "states")), *step)
    with pytest.raises(NotImplementedError, match=f"gated_delta_rule: GPU kernels take {message}"):
        gated_delta_rule(*arguments, backend="gpu")
    expected = gated_delta_rule(*arguments, backend="xla")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(mosaic, "reason_without_hopper", lambda: None)
    with pytest.warns(RuntimeWarning, match="vectorised XLA runs instead"):
        result = gated_delta_rule(*arguments)
    np.testing.assert_array_equal(result.out, expected.out)


@pytest.mark.parametrize(
    ("shape", "kernel"), [(SCALAR, "delta_c32_t4"), (CHANNEL, "delta_c32_t4_channel"), (DECODE, "delta_c64_t1")]
)
def test_the_op_takes_the_kernel_on_a_gpu(shape: DeltaCase, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "auto" there, and "gpu" anywhere, trace the kernel."""
    arrays, step = shape.step(np.random.default_rng(0), [])
    arguments = (*(jnp.asarray(arrays[n]) for n in (*INPUTS, "states")), *step)

    def traced(backend: str) -> bool:
        return kernel in str(jax.make_jaxpr(functools.partial(gated_delta_rule, backend=backend))(*arguments))

    assert traced("gpu")
    assert not traced("auto")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(mosaic, "reason_without_hopper", lambda: None)
    assert traced("auto")

"""The TPU kernel of gated_delta_rule against numpy's recurrence: ragged steps, NaN wherever nobody may look, races."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cases.states import Arrays, Step
from pallas_kernels.gated_delta_rule import gated_delta_rule, tpu_decode, tpu_rule
from pallas_kernels.gated_delta_rule.arguments import Inputs, Options
from pallas_kernels.gated_delta_rule.cases import DeltaCase
from pallas_kernels.gated_delta_rule.oracle import INPUTS
from pallas_kernels.gated_delta_rule.shapes import SHAPES as MODELS
from pallas_kernels.interpret.on_tpu import RaceError, compile_on_tpu, tpu_device
from pallas_kernels.state_step import StepArrays
from pallas_kernels.tpu.decode_states import StateTiles
from pallas_kernels.tpu.segment_states import CarriedState
from tests.pallas_kernels.gated_delta_rule.test_gated_delta_rule import small

# Decode over two tiles of tokens, beside other sequences, alone, none; sequences over borders of chunks.
LENGTHS = ([1, 1, 1, 1, 1, 0, 1, 1, 1, 1], [1, 1, 0, 1, 65, 2, 1, 3], [1], [], [0, 17, 1, 1, 50])
SCALAR = small(1, 4, 128, 128, tokens=76, seqs=10, q_dtype="bfloat16")
CHANNEL = small(2, 2, 128, 128, True, tokens=76, seqs=10)
DRAFTS = small(1, 1, 128, 128, tokens=76, seqs=10, num_pages=40, kept=3)
SHAPES = [
    SCALAR,
    CHANNEL,
    DRAFTS,
    pytest.param(
        small(2, 4, 128, 256, True, 76, q_dtype="bfloat16", state_dtype="bfloat16", seqs=10), marks=pytest.mark.sweep
    ),
    pytest.param(small(1, 3, 256, 128, tokens=76, seqs=10, l2norm=0), marks=pytest.mark.sweep),
]


def rule(arrays: Arrays, step: Step, options: Options) -> Any:
    inputs = Inputs(*(jnp.asarray(arrays[name]) for name in INPUTS))
    return tpu_rule.gated_delta_rule(inputs, jnp.asarray(arrays["states"]), StepArrays(*step), options=options)


@functools.cache
def compiled(shape: DeltaCase) -> Callable[..., Any]:
    """(arrays, step) -> (out, states)."""
    arrays, step = shape.step(np.random.default_rng(0), [])
    options = Options(shape.scale, bool(shape.l2norm))
    return compile_on_tpu(functools.partial(rule, options=options), arrays, step)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_recurrence(shape: DeltaCase) -> None:
    """Decode, prefill, mixed and drafts; lengths 0 and 1; states in place and elsewhere, shared and none."""
    for seed, q_lens in enumerate(LENGTHS):
        arrays, step = shape.step(np.random.default_rng(seed), q_lens)
        shape.assert_step(compiled(shape)(arrays, step), arrays, step)


@pytest.mark.parametrize("shape", [SCALAR, CHANNEL, DRAFTS], ids=["scalar", "channel", "drafts"])
def test_segments_end_at_checkpoints(shape: DeltaCase) -> None:
    """At random lengths, and one each before, at and after the border of two chunks."""
    shape = dataclasses.replace(shape, checkpoints=3, num_pages=70)
    for seed, q_lens in enumerate(LENGTHS[1:]):
        arrays, step = shape.step(np.random.default_rng(seed), q_lens)
        shape.assert_step(compiled(shape)(arrays, step), arrays, step)
    arrays, step = dataclasses.replace(shape, checkpoints=0).step(np.random.default_rng(4), [1, 1, 74])
    step = step.with_checkpoint_of(2, [61, 62, 63], shape.num_pages)
    shape.assert_step(compiled(shape)(arrays, step), arrays, step)


def test_the_split_of_rows_does_not_matter() -> None:
    """`distribution` may call every sequence mixed."""
    arrays, step = SCALAR.step(np.random.default_rng(6), [1, 1, 10, 3])
    mixed = step._replace(distribution=np.array([0, 0, 4], np.int32))
    SCALAR.assert_step(compiled(SCALAR)(arrays, mixed), arrays, step)


def test_what_is_not_finite_stays_in_its_sequence() -> None:
    """A sequence whose inputs are not finite changes no bit of the others that decode beside it."""
    arrays, step = CHANNEL.step(np.random.default_rng(5), [1, 1, 1, 6])
    out, states = compiled(CHANNEL)(arrays, step)
    dirty = {name: array.copy() for name, array in arrays.items()}
    dirty["k"][1], dirty["g"][1], dirty["v"][1] = np.nan, np.inf, np.inf
    got, after = compiled(CHANNEL)(dirty, step)
    others = np.setdiff1d(np.arange(9), [1])
    np.testing.assert_array_equal(got[others], out[others])
    pages = np.setdiff1d(np.arange(CHANNEL.num_pages), step.state_write[1])
    np.testing.assert_array_equal(after[pages], states[pages])
    assert np.isnan(got[1]).any()


def _into_the_tile_in_use(self: StateTiles, step: Any, b: Any, page: Any) -> Any:
    return pltpu.make_async_copy(self._tile(step, page), self.coming.at[1 - (step & 1), b], self.arrived.at[step & 1])


@pytest.mark.skipif(tpu_device() is not None, reason="races are seen by the interpreter only")
def test_a_race_planted_in_decoding_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """States loaded into the tile in use: a race is reported."""
    monkeypatch.setattr(StateTiles, "_loading", _into_the_tile_in_use)
    jax.clear_caches()
    ones = jnp.ones
    inputs = Inputs(*[ones((16, 1, 128))] * 2, ones((16, 1, 128)), ones((16, 1, 1)), ones((16, 1)))
    pages = (*[jnp.arange(16, dtype=jnp.int32) % 12] * 2, jnp.int32(12))
    run = compile_on_tpu(tpu_decode.decode, inputs, ones((12, 1, 128, 128)), *pages)
    with pytest.raises(RaceError, match=r"race|RACE"):
        run(inputs, ones((12, 1, 128, 128)), *pages)
    jax.clear_caches()


def _out_of_the_state_that_comes(self: CarriedState, page: Any) -> Any:
    return pltpu.make_async_copy(self.buffers.coming, self.states.at[page], self.buffers.left)


@pytest.mark.skipif(tpu_device() is not None, reason="races are seen by the interpreter only")
def test_a_race_planted_in_chunks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """States stored from where the next one comes: a race is reported."""
    monkeypatch.setattr(CarriedState, "_storing", _out_of_the_state_that_comes)
    jax.clear_caches()
    shape = small(1, 1, 128, 128, tokens=12, seqs=3)
    arrays, step = shape.step(np.random.default_rng(8), [3, 3, 3])
    step = step._replace(state_read=step.state_write[:, 0], has_initial_state=np.ones(3, bool))
    arrays["states"][:] = 1
    run = compile_on_tpu(functools.partial(rule, options=Options(1.0, False)), arrays, step)
    with pytest.raises(RaceError, match=r"race|RACE"):
        run(arrays, step)
    jax.clear_caches()


def test_what_does_not_fit_vmem() -> None:
    """States of all models do, whole, with their inputs; larger ones do where heads are split."""

    def reason(key_heads: int, heads: int, is_per_channel: bool) -> str | None:
        shapes = ((7, heads, 128), (7, key_heads, 128), (7, heads, 128 if is_per_channel else 1), (9, heads, 128, 128))
        return tpu_rule.reason_not_supported(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))

    assert [reason(m.key_heads, m.value_heads, m.is_per_channel) for m in MODELS] == [None] * len(MODELS)
    assert re.search("whole state in VMEM, with inputs 40 MiB, got 48 MiB; split the heads", reason(96, 96, True) or "")
    assert reason(48, 48, True) is None


BAD = {
    "key": (small(1, 1, 64, 128, tokens=3), "keys and values in multiples of 128, got 64 and 128"),
    "value": (small(1, 1, 128, 64, tokens=3), "keys and values in multiples of 128, got 128 and 64"),
    "float16": (small(1, 1, 128, 128, tokens=3, state_dtype="float16"), "no arithmetic on float16"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_the_kernel_cannot_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """backend="tpu" refuses; "auto" on a TPU warns and gives what the reference gives."""
    shape, message = BAD[name]
    arrays, step = shape.step(np.random.default_rng(0), [1, 2])
    arguments = (*(jnp.asarray(arrays[n]) for n in (*INPUTS, "states")), *step)
    with pytest.raises(NotImplementedError, match=f"gated_delta_rule: .*{message}"):
        gated_delta_rule(*arguments, backend="tpu")
    expected = gated_delta_rule(*arguments, backend="reference")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.warns(RuntimeWarning, match="the reference runs instead"):
        result = gated_delta_rule(*arguments)
    np.testing.assert_array_equal(result.out, expected.out)


def test_tiles_of_heads() -> None:
    """Parts of a group or whole groups, two heads of 128 x 128 in float32, four in bfloat16."""
    per_model = {"qwen3-next-80b-a3b": (2, 4), "qwen3.5-27b": (1, 3), "qwen3.5-397b-a17b": (2, 4)}
    for model in MODELS:
        group, size = model.value_heads // model.key_heads, model.key_dim * model.value_dim
        got = tuple(tpu_decode.heads_per_tile(model.value_heads, group, size * n) for n in (4, 2))
        assert got == per_model.get(model.name, (2, 4))
    assert tpu_decode.heads_per_tile(5, 5, 1 << 24) == 1


def test_the_op_takes_the_kernel_on_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "auto" there, and "tpu" anywhere, trace the kernel."""
    arrays, step = SCALAR.step(np.random.default_rng(0), [])
    arguments = (*(jnp.asarray(arrays[n]) for n in (*INPUTS, "states")), *step)

    def has_kernel(backend: str) -> bool:
        text = str(jax.make_jaxpr(functools.partial(gated_delta_rule, backend=backend))(*arguments))
        return "delta_decode_h2" in text and "delta_chunks" in text

    assert has_kernel("tpu")
    assert not has_kernel("auto")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert has_kernel("auto")

"""The TPU kernels of selective_scan against numpy's recurrences: ragged steps, NaN wherever nobody may look, races."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cases.states import Step, on_device
from pallas_kernels.interpret.on_tpu import RaceError, compile_on_tpu, tpu_device
from pallas_kernels.ssm_update import selective_scan, tpu_decode, tpu_mamba1, tpu_scan
from pallas_kernels.ssm_update.arguments import Scan
from pallas_kernels.ssm_update.cases import ScanCase
from pallas_kernels.ssm_update.shapes import SHAPES as MODELS
from pallas_kernels.ssm_update.shapes import SsmShape
from pallas_kernels.state_step import StepArrays
from pallas_kernels.tpu.decode_states import StateTiles
from pallas_kernels.tpu.segment_states import CarriedState
from tests.pallas_kernels.cases import assert_close
from tests.pallas_kernels.ssm_update.test_selective_scan import small as scan_case

NUM_ROWS, NUM_PAGES = 10, 24
small = functools.partial(scan_case, seqs=NUM_ROWS, num_pages=NUM_PAGES)
# Decode over two tiles of tokens; sequences over borders of chunks and beside each other; nothing; all of one.
LENGTHS = (
    [1, 1, 1, 1, 1, 0, 1, 1, 1, 1],
    [1, 1, 0, 1, 100, 2, 8, 37],
    [],
    [0, 127, 1, 1, 21],
)
NUM_TOKENS = 150
MAMBA2 = small(4, 64, 128, groups=2, tokens=NUM_TOKENS, q_dtype="bfloat16", most_dt=3.0)
EXACT2 = small(4, 32, 128, tokens=NUM_TOKENS)
# Small, since the interpreter takes each load of a kernel apart; chunks of 16 tokens, 4 unrolled.
MAMBA1 = small(256, 0, 8, tokens=40, q_dtype="bfloat16", most_dt=3.0)
SHORT_LENGTHS = ([1, 1, 1, 1, 1, 0, 1, 1, 1, 1], [1, 1, 0, 1, 20, 2, 8, 7], [], [0, 31, 1, 1, 7])
DRAFTS = small(2, 64, 128, tokens=40, kept=3)
SHAPES = [
    MAMBA1,
    MAMBA2,
    EXACT2,
    DRAFTS,
    pytest.param(small(128, 0, 8, tokens=40, kept=3), marks=pytest.mark.sweep),
    pytest.param(small(1152, 0, 16, tokens=NUM_TOKENS), marks=pytest.mark.sweep),
    pytest.param(small(2048, 0, 16, 1, 40, "bfloat16", "bfloat16"), marks=pytest.mark.sweep),
    pytest.param(small(3, 128, 256, tokens=NUM_TOKENS, q_dtype="bfloat16"), marks=pytest.mark.sweep),
    pytest.param(small(32, 8, 128, 2, NUM_TOKENS, "bfloat16", "bfloat16"), marks=pytest.mark.sweep),
    pytest.param(small(20, 64, 128, 2, 40, "bfloat16", "bfloat16"), marks=pytest.mark.sweep),
]

Arguments = tuple[dict[str, Any], Step]


def make(rng: np.random.Generator, shape: ScanCase, q_lens: Sequence[int]) -> Arguments:
    return shape.step(rng, q_lens)


def scan(arrays: dict[str, Any], step: Any, limit: tuple[float, float]) -> Any:
    arguments = Scan(*(jnp.asarray(arrays[name]) for name in Scan._fields))
    return tpu_scan.selective_scan(arguments, jnp.asarray(arrays["states"]), StepArrays(*step), dt_limit=limit)


@functools.cache
def compiled(shape: ScanCase) -> Callable[..., Any]:
    """(arrays, step) -> (out, states)."""
    arrays, step = make(np.random.default_rng(0), shape, [])
    with pytest.MonkeyPatch.context() as patch:
        if shape.tokens < NUM_TOKENS:
            patch.setattr(tpu_mamba1, "chunk_tokens", lambda num_channels: 16)
            patch.setattr(tpu_mamba1, "_UNROLLED", 4)
        return compile_on_tpu(functools.partial(scan, limit=shape.limit), arrays, on_device(step))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_recurrence(shape: ScanCase) -> None:
    """Decode, prefill, mixed and drafts; lengths 0 and 1; states in place and elsewhere, shared and none."""
    run = compiled(shape)
    for seed, q_lens in enumerate(LENGTHS if shape.tokens == NUM_TOKENS else SHORT_LENGTHS):
        arrays, step = make(np.random.default_rng(seed), shape, q_lens)
        shape.assert_step(run(arrays, on_device(step)), arrays, step)


@pytest.mark.parametrize(
    ("shape", "q_lens", "border"),
    [(MAMBA1, [1, 1, 38], 14), (MAMBA2, [1, 1, 148], 126), (DRAFTS, [1, 1, 38], 30)],
    ids=["mamba1", "mamba2", "drafts"],
)
def test_segments_end_at_checkpoints(shape: ScanCase, q_lens: Sequence[int], border: int) -> None:
    """At random lengths, and one each before, at and after the border of two chunks."""
    shape = dataclasses.replace(shape, checkpoints=3, num_pages=80)
    run = compiled(shape)
    for seed, random_lens in enumerate(LENGTHS[1:] if shape.tokens == NUM_TOKENS else SHORT_LENGTHS[1:]):
        arrays, step = make(np.random.default_rng(seed), shape, random_lens)
        shape.assert_step(run(arrays, on_device(step)), arrays, step)
    arrays, step = make(np.random.default_rng(4), dataclasses.replace(shape, checkpoints=0), q_lens)
    step = step.with_checkpoint_of(2, [border - 1, border, border + 1], shape.num_pages)
    shape.assert_step(run(arrays, on_device(step)), arrays, step)


@pytest.mark.parametrize("shape", [MAMBA1, MAMBA2], ids=["mamba1", "mamba2"])
def test_what_is_not_finite_stays_in_its_sequence(shape: ScanCase) -> None:
    """A sequence whose inputs are not finite changes no bit of the others, also where they share a chunk."""
    run = compiled(shape)
    q_lens = [1, 1, 5, 80, 30, 1] if shape is MAMBA2 else [1, 1, 3, 20, 4, 1]
    arrays, step = make(np.random.default_rng(5), shape, q_lens)
    out, states = run(arrays, on_device(step))
    for row in (1, 3):
        tokens = step.tokens(row)
        dirty = {name: array.copy() for name, array in arrays.items()}
        for name, value in (("x", np.nan), ("b", np.nan), ("c", np.inf), ("dt", np.inf)):
            dirty[name][tokens.start] = value
        got, after = run(dirty, on_device(step))
        others = np.setdiff1d(np.arange(sum(q_lens)), np.arange(NUM_TOKENS)[tokens])
        np.testing.assert_array_equal(got[others], out[others])
        pages = np.setdiff1d(np.arange(NUM_PAGES), step.state_write[row])
        np.testing.assert_array_equal(after[pages], states[pages])
        assert np.isnan(got[tokens].astype(np.float32)).any()


def test_the_split_of_rows_does_not_matter() -> None:
    """`distribution` may call every sequence mixed; a row without a page to write computes its outputs all the same."""
    arrays, step = make(np.random.default_rng(6), MAMBA2, [1, 1, 40, 3])
    unwritten = step._replace(distribution=np.array([0, 0, 4], np.int32), state_write=np.zeros_like(step.state_write))
    out, states = compiled(MAMBA2)(arrays, on_device(unwritten))
    assert_close(out, MAMBA2.oracle(arrays, step)[0], "bfloat16", "out")
    assert states.tobytes() == arrays["states"].tobytes()


def _into_the_tile_in_use(self: StateTiles, step: Any, b: Any, page: Any) -> Any:
    return pltpu.make_async_copy(self._tile(step, page), self.coming.at[1 - (step & 1), b], self.arrived.at[step & 1])


def _out_of_the_state_that_comes(self: CarriedState, page: Any) -> Any:
    return pltpu.make_async_copy(self.buffers.coming, self.states.at[page], self.buffers.left)


@pytest.mark.skipif(tpu_device() is not None, reason="races are seen by the interpreter only")
def test_a_race_planted_in_decoding_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """States loaded into the tile in use: a race is reported."""
    monkeypatch.setattr(StateTiles, "_loading", _into_the_tile_in_use)
    jax.clear_caches()
    inputs = (jnp.ones((12, 2, 8, 128)), jnp.ones((16, 2, 8)), jnp.ones((16, 2)), *[jnp.ones((16, 1, 128))] * 2)
    pages = (*[jnp.arange(16, dtype=jnp.int32) % 12] * 2, jnp.int32(12))
    run = compile_on_tpu(tpu_decode.mamba2, *inputs, *pages)
    with pytest.raises(RaceError, match=r"race|RACE"):
        run(*inputs, *pages)
    jax.clear_caches()


@pytest.mark.skipif(tpu_device() is not None, reason="races are seen by the interpreter only")
def test_a_race_planted_in_segments_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """States stored from where the next one comes: a race is reported."""
    monkeypatch.setattr(CarriedState, "_storing", _out_of_the_state_that_comes)
    jax.clear_caches()
    shape = small(2, 64, 128, tokens=12)
    arrays, step = make(np.random.default_rng(8), shape, [3, 3, 3])
    step = step._replace(state_read=step.state_write[:, 0], has_initial_state=np.ones(NUM_ROWS, bool))
    arrays["states"][:] = 1
    run = compile_on_tpu(functools.partial(scan, limit=shape.limit), arrays, on_device(step))
    with pytest.raises(RaceError, match=r"race|RACE"):
        run(arrays, on_device(step))
    jax.clear_caches()


BAD: dict[str, tuple[tuple[int, int | None, int, int], str, str]] = {
    "channels": ((136, None, 16, 1), "float32", "multiples of 128 and .* of 8, got 136 and 16"),
    "numbers": ((128, None, 12, 1), "float32", "multiples of 128 and .* of 8, got 128 and 12"),
    "float16": ((2, 64, 128, 1), "float16", "no arithmetic on float16"),
    "state": ((2, 64, 64, 1), "float32", "states in multiples of 128, got 64"),
    "head": ((2, 48, 128, 1), "float32", "heads of 8, 16, 32, 64 or multiples of 128, got 48"),
    "group": ((3, 64, 128, 1), "float32", "groups of multiples of 2 heads of 64, got 3"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_the_kernels_cannot_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """backend="tpu" refuses; "auto" on a TPU warns and gives what the reference gives."""
    (heads, head_dim, state_dim, groups), dtype, message = BAD[name]
    shape = small(heads, head_dim, state_dim, groups, tokens=3, q_dtype=dtype)
    arrays, step = make(np.random.default_rng(0), shape, [1, 2])
    arguments = (*(jnp.asarray(arrays[n]) for n in ("x", "states", "dt", "a", "b", "c")), *on_device(step))
    with pytest.raises(NotImplementedError, match=f"selective_scan: .*{message}"):
        selective_scan(*arguments, backend="tpu")
    expected = selective_scan(*arguments, backend="reference")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.warns(RuntimeWarning, match="the reference runs instead"):
        result = selective_scan(*arguments)
    np.testing.assert_array_equal(result.out, expected.out)


def reason(model: SsmShape, num_shards: int = 1) -> str | None:
    """What of a model's layer the kernels cannot do."""
    _, groups = model.per_shard(num_shards)
    state = model.state_shapes(num_shards)[1]
    shapes = ((7, *state[:-1]), (9, *state), (7, *[groups] * (len(state) - 2), state[-1]))
    return tpu_scan.reason_not_supported(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))


def test_states_that_fit_vmem() -> None:
    """Those of all models do, whole; larger ones do where heads are split."""
    assert [reason(model) for model in MODELS] == [None] * len(MODELS)
    large = SsmShape("large", "none", 320, 128, 64)
    assert re.search("whole state in VMEM, with inputs 40 MiB, got 50 MiB; split the heads", reason(large) or "")
    assert reason(large, 2) is None


@pytest.mark.parametrize(
    ("shape", "kernels"),
    [(MAMBA1, ("scan_decode_c256", "scan_c128")), (MAMBA2, ("ssd_decode_h2", "ssd_h2"))],
    ids=["mamba1", "mamba2"],
)
def test_the_op_takes_the_kernels_on_a_tpu(
    shape: ScanCase, kernels: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "auto" there, and "tpu" anywhere, trace the kernels."""
    arrays, step = make(np.random.default_rng(0), shape, [])
    arguments = (*(jnp.asarray(arrays[n]) for n in ("x", "states", "dt", "a", "b", "c")), *on_device(step))

    def traced(backend: str) -> list[bool]:
        text = str(jax.make_jaxpr(functools.partial(selective_scan, backend=backend))(*arguments))
        return [f"name={kernel}" in text or f" {kernel}" in text for kernel in kernels]

    assert all(traced("tpu"))
    assert not any(traced("auto"))
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert all(traced("auto"))

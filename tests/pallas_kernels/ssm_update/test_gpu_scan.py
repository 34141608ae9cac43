"""The GPU kernel of selective_scan against numpy's recurrences: ragged steps, NaN wherever nobody may look, races."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cases.states import Step, on_device
from pallas_kernels.gpu import mosaic
from pallas_kernels.interpret.on_gpu import compile_on_gpu
from pallas_kernels.ssm_update import gpu_scan, selective_scan
from pallas_kernels.ssm_update.arguments import Scan
from pallas_kernels.ssm_update.cases import ScanCase
from pallas_kernels.ssm_update.shapes import SHAPES as MODELS
from pallas_kernels.state_step import StepArrays
from tests.pallas_kernels.cases import assert_close
from tests.pallas_kernels.ssm_update.test_selective_scan import small

NUM_ROWS, NUM_PAGES, NUM_TOKENS = 5, 12, 11
LENGTHS = ([1, 0, 1, 9], [])  # two trips of tokens loaded together and one token more
DECODE_LENGTHS = ([1, 1, 0, 1, 1], [1, 3])
MAMBA1 = small(64, 0, 8, tokens=NUM_TOKENS)
MAMBA2 = small(4, 16, 64, groups=2, tokens=NUM_TOKENS, q_dtype="bfloat16", most_dt=3.0)
DECODE = small(2, 32, 32, tokens=NUM_ROWS, q_dtype="bfloat16", state_dtype="bfloat16")  # no token is loaded ahead
DRAFTS = small(2, 16, 32, tokens=NUM_TOKENS, kept=3)
SHAPES = [MAMBA1, MAMBA2, DECODE, DRAFTS]
Arguments = tuple[dict[str, Any], Step]


def make(rng: np.random.Generator, shape: ScanCase, q_lens: Sequence[int]) -> Arguments:
    return shape.step(rng, q_lens)


@functools.cache
def compiled(shape: ScanCase) -> Callable[..., Any]:
    """(arrays, step) -> (out, states)."""

    def scan(arrays: dict[str, Any], step: Any) -> Any:
        arguments = Scan(*(arrays[name] for name in Scan._fields))
        return gpu_scan.selective_scan(arguments, arrays["states"], StepArrays(*step), dt_limit=shape.limit)

    arrays, step = make(np.random.default_rng(0), shape, [])
    return compile_on_gpu(scan, arrays, on_device(step))


def assert_right(shape: ScanCase, seed: int, q_lens: Sequence[int]) -> None:
    arrays, step = make(np.random.default_rng(seed), shape, q_lens)
    shape.assert_step(compiled(shape)(arrays, on_device(step)), arrays, step)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_recurrence(shape: ScanCase) -> None:
    """Decode, prefill, mixed and drafts; lengths 0 and 1; states in place and elsewhere, shared and none."""
    for seed, q_lens in enumerate(DECODE_LENGTHS if shape is DECODE else LENGTHS):
        assert_right(shape, seed, q_lens)


@pytest.mark.parametrize("shape", [MAMBA1, DRAFTS], ids=["mamba1", "mamba2 with drafts"])
def test_checkpoints_are_left_on_the_way(shape: ScanCase) -> None:
    """Within tokens loaded together and after them."""
    shape = dataclasses.replace(shape, checkpoints=3, num_pages=40)
    for seed, q_lens in enumerate([[1, 0, 1, 9], [2, 9], [11]]):
        assert_right(shape, seed, q_lens)


def test_what_is_not_finite_stays_in_its_sequence() -> None:
    """A sequence whose inputs are not finite changes no bit of the others."""
    run = compiled(MAMBA2)
    q_lens = [1, 2, 5]
    arrays, step = make(np.random.default_rng(5), MAMBA2, q_lens)
    out, states = run(arrays, on_device(step))
    tokens = step.tokens(1)
    dirty = {name: array.copy() for name, array in arrays.items()}
    for name, value in (("x", np.nan), ("b", np.nan), ("c", np.inf), ("dt", np.inf)):
        dirty[name][tokens.start] = value
    got, after = run(dirty, on_device(step))
    others = np.setdiff1d(np.arange(sum(q_lens)), np.arange(NUM_TOKENS)[tokens])
    np.testing.assert_array_equal(got[others], out[others])
    pages = np.setdiff1d(np.arange(NUM_PAGES), step.state_write[1])
    np.testing.assert_array_equal(after[pages], states[pages])
    assert np.isnan(got[tokens].astype(np.float32)).any()


def test_the_split_of_rows_does_not_matter() -> None:
    """`distribution` may call every sequence mixed; a row without a page to write computes its outputs all the same."""
    arrays, step = make(np.random.default_rng(6), MAMBA2, [1, 5])
    unwritten = step._replace(distribution=np.array([0, 0, 2], np.int32), state_write=np.zeros_like(step.state_write))
    out, states = compiled(MAMBA2)(arrays, on_device(unwritten))
    assert_close(out, MAMBA2.oracle(arrays, step)[0], "bfloat16", "out")
    assert states.tobytes() == arrays["states"].tobytes()


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
def test_all_models_are_supported(model: Any, num_shards: int) -> None:
    state = model.state_shapes(num_shards)[1]
    x, states = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((7, *state[:-1]), (9, *state)))
    assert gpu_scan.reason_not_supported(x, states) is None


BAD: dict[str, tuple[tuple[int, int | None, int], str, str]] = {
    "numbers": ((32, None, 12), "float32", "states in multiples of 8 up to 256 numbers, got 12"),
    "large": ((2, 64, 512), "float32", "states in multiples of 8 up to 256 numbers, got 512"),
    "channels": ((40, None, 16), "float32", "channels in multiples of 32 for states of 16 numbers, got 40"),
    "head": ((2, 24, 128), "float32", "heads in multiples of 16 for states of 128 numbers, got 24"),
}


def refused(name: str) -> tuple:
    """Arguments of the op."""
    (heads, head_dim, state_dim), dtype, _ = BAD[name]
    shape = small(heads, head_dim, state_dim, tokens=3, q_dtype=dtype)
    arrays, step = make(np.random.default_rng(0), shape, [1, 2])
    return (*(jnp.asarray(arrays[n]) for n in ("x", "states", "dt", "a", "b", "c")), *on_device(step))


@pytest.mark.parametrize("name", BAD)
def test_what_the_kernel_cannot_do(name: str) -> None:
    """backend="gpu" refuses."""
    with pytest.raises(NotImplementedError, match=f"selective_scan: GPU kernels take {BAD[name][-1]}"):
        selective_scan(*refused(name), backend="gpu")


def test_auto_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it warns once, and gives what vectorised XLA gives."""
    arguments = refused("numbers")
    expected = selective_scan(*arguments, backend="xla")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(mosaic, "reason_without_hopper", lambda: None)
    with pytest.warns(RuntimeWarning, match="vectorised XLA runs instead"):
        result = selective_scan(*arguments)
    np.testing.assert_array_equal(result.out, expected.out)
    selective_scan(*arguments)  # no second warning


@pytest.mark.parametrize(
    ("shape", "kernel"), [(MAMBA1, "scan1_r64_t4"), (MAMBA2, "scan2_r16_t4")], ids=["mamba1", "mamba2"]
)
def test_the_op_takes_the_kernel_on_a_gpu(shape: ScanCase, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "auto" there, and "gpu" anywhere, trace the kernel."""
    arrays, step = make(np.random.default_rng(0), shape, [])
    arguments = (*(jnp.asarray(arrays[n]) for n in ("x", "states", "dt", "a", "b", "c")), *on_device(step))

    def traced(backend: str) -> bool:
        return kernel in str(jax.make_jaxpr(functools.partial(selective_scan, backend=backend))(*arguments))

    assert traced("gpu")
    assert not traced("auto")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(mosaic, "reason_without_hopper", lambda: None)
    assert traced("auto")

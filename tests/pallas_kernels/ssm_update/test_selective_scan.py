"""Selective scan over states in pages against numpy's recurrence (Mamba 1) and dual form (Mamba 2), and its laws."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cases.states import Step, on_device, random_states, random_step
from pallas_kernels.ssm_update import SsmOutput, reference, selective_scan
from pallas_kernels.ssm_update.cases import ScanCase
from pallas_kernels.ssm_update.shapes import SHAPES
from tests.pallas_kernels.cases import assert_close

NUM_ROWS, NUM_PAGES = 5, 12


def small(
    heads: int = 6,
    head_dim: int = 0,
    state_dim: int = 4,
    groups: int = 1,
    tokens: int = 150,
    q_dtype: str = "float32",
    state_dtype: str = "float32",
    *,
    kept: int = 1,
    checkpoints: int = 0,
    seqs: int = NUM_ROWS,
    num_pages: int = NUM_PAGES,
    **limits: float,
) -> ScanCase:
    """A case with pages for all states; each of a sequence beside the last needs `seqs` more."""
    return ScanCase(
        tokens=tokens,
        seqs=seqs,
        kept=kept,
        checkpoints=checkpoints,
        num_pages=num_pages + (kept - 1 + checkpoints) * seqs,
        q_dtype=q_dtype,
        state_dtype=state_dtype,
        heads=heads,
        head_dim=head_dim,
        state_dim=state_dim,
        groups=groups,
        **limits,
    )


MAMBA1, MAMBA2 = small(), small(head_dim=3, groups=2)


@functools.cache
def jitted(limit: tuple[float, float] = MAMBA1.limit) -> Callable[..., SsmOutput]:
    return jax.jit(functools.partial(selective_scan, dt_limit=limit, backend="reference"))


def run(arrays: dict[str, Any], step: Step, limit: tuple[float, float] = MAMBA1.limit) -> SsmOutput:
    names = ("x", "states", "dt", "a", "b", "c")
    options = {name: arrays[name] for name in ("d", "dt_bias") if name in arrays}
    return jitted(limit)(*(arrays[name] for name in names), *on_device(step), **options)


def check(shape: ScanCase, seed: int, q_lens: Sequence[int]) -> None:
    """One random step."""
    arrays, step = shape.step(np.random.default_rng(seed), q_lens)
    got = run(arrays, step, shape.limit)
    shape.assert_step(got, arrays, step)
    assert got.out.dtype == arrays["x"].dtype


@pytest.mark.parametrize("tokens_of_a_chunk", [1, 7])
def test_the_size_of_a_chunk_changes_nothing(monkeypatch: pytest.MonkeyPatch, tokens_of_a_chunk: int) -> None:
    """Sequences end inside chunks, with them and beyond them."""
    shape = small(tokens=20 + tokens_of_a_chunk)  # of its own, so that it is traced anew
    monkeypatch.setattr(reference, "_CHUNK_NUMBERS", tokens_of_a_chunk * 24)
    check(shape, 0, [1, 2, 4, 7, 6])


def test_filling_the_last_chunk_leaves_the_first_sequence_alone() -> None:
    """80 x 64 x 128 states: chunks of 6 tokens. The first sequence has one token and writes another page than it reads.

    64 tokens do not fill chunks: what fills the last one is of no sequence, and must not write the first one's page.
    """
    shape = small(heads=80, head_dim=64, state_dim=128, tokens=64, seqs=2, num_pages=8)
    arrays, step = shape.step(np.random.default_rng(0), [1, 63])
    step.state_read[:], step.has_initial_state[:] = (5, 6), True
    step.state_write[:] = [[1], [2]]
    arrays["states"] = np.random.default_rng(1).standard_normal((8, *shape.state_shape)).astype(np.float32)
    arrays["states"][0] = 0
    shape.assert_step(run(arrays, step), arrays, step)


@pytest.mark.parametrize("shape", [MAMBA1, MAMBA2], ids=["mamba1", "mamba2"])
def test_chunked_prefill_and_decode_equal_the_whole(shape: ScanCase) -> None:
    """Steps of any cut, each from the page that the one before wrote, over pages of NaN."""
    rng = np.random.default_rng(1)
    arrays = shape.inputs(rng)

    def in_steps(counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        states = jnp.full((4, *shape.state_shape), jnp.nan).at[0].set(0)
        outs, done, read, write = [], 0, 1, 2
        for count in counts:
            new = {name: np.full_like(array, 5) for name, array in arrays.items()} | {"a": arrays["a"]}
            for name in ("x", "dt", "b", "c"):
                new[name][:count] = arrays[name][done : done + count]
            ends = [int(count == 1), int(count == 1), 1]
            step = Step(*(np.array(y, np.int32) for y in ([0, count], ends, [read], [write])), np.array([done > 0]))
            result = run(new | {"states": states, "d": arrays["d"], "dt_bias": arrays["dt_bias"]}, step)
            states, done, read, write = result.states, done + count, write, read
            outs.append(result.out[:count])
        return np.concatenate(outs), np.asarray(states[read])

    whole, last = in_steps([shape.tokens])
    for counts in ([1, 1, 64, 65, 1, 18], [50] * 3):
        out, state = in_steps(counts)
        assert_close(out, whole.astype(np.float64), "float32", "out")
        assert_close(state, last.astype(np.float64), "float32", "state")


@pytest.mark.parametrize("shape", [MAMBA1, MAMBA2], ids=["mamba1", "mamba2"])
def test_what_is_not_finite_stays_in_its_sequence(shape: ScanCase) -> None:
    """A sequence whose inputs or state are NaN changes no bit of the others, also where they share a chunk."""
    rng = np.random.default_rng(2)
    step = random_step(rng, [1, 5, 80, 30, 1], NUM_ROWS, NUM_PAGES)
    arrays = shape.inputs(rng)
    arrays["states"] = random_states(rng, step, shape.state_shape, NUM_PAGES, "float32")
    clean = run(arrays, step)
    for row in (1, 2):
        tokens = step.tokens(row)
        dirty = dict(arrays, x=arrays["x"].copy(), dt=arrays["dt"].copy())
        dirty["x"][tokens.start], dirty["dt"][tokens.stop - 1] = np.nan, np.inf
        got = run(dirty, step)
        others = np.setdiff1d(np.arange(117), np.arange(shape.tokens)[tokens])
        np.testing.assert_array_equal(got.out[others], clean.out[others])
        pages = np.setdiff1d(np.arange(NUM_PAGES), step.state_write[row])
        np.testing.assert_array_equal(got.states[pages], clean.states[pages])
        assert np.isnan(np.asarray(got.out)[tokens]).any()


def test_the_null_page_is_never_written() -> None:
    """A row without a page to write computes its outputs all the same."""
    rng = np.random.default_rng(4)
    step = random_step(rng, [4, 1], NUM_ROWS, NUM_PAGES)
    arrays = MAMBA1.inputs(rng) | {"states": random_states(rng, step, MAMBA1.state_shape, NUM_PAGES, "float32")}
    got = run(arrays, step._replace(state_write=np.zeros_like(step.state_write)))
    np.testing.assert_array_equal(got.out, run(arrays, step).out)
    np.testing.assert_array_equal(got.states, arrays["states"])


def test_without_options() -> None:
    """No d and no bias are zeros."""
    rng = np.random.default_rng(3)
    step = random_step(rng, [4, 1], NUM_ROWS, NUM_PAGES)
    arrays = MAMBA1.inputs(rng) | {"states": random_states(rng, step, MAMBA1.state_shape, NUM_PAGES, "float32")}
    bare = {name: array for name, array in arrays.items() if name not in ("d", "dt_bias")}
    zeros = {name: np.zeros_like(arrays[name]) for name in ("d", "dt_bias")}
    np.testing.assert_array_equal(run(bare, step).out, run(bare | zeros, step).out)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(m.name, marks=() if m.name in ("jamba-1.5-large", "mamba-codestral-7b") else pytest.mark.sweep)
        for m in SHAPES
    ],
)
def test_model_shape(name: str) -> None:
    """bfloat16 inputs over float32 states, one shard of eight; a decode and a prefill row."""
    (model,) = (shape for shape in SHAPES if shape.name == name)
    heads, groups = model.per_shard(8)
    shape = small(heads, model.head_dim or 0, model.state_dim, groups, tokens=7, q_dtype="bfloat16")
    assert model.state_shapes(8)[1] == shape.state_shape
    check(shape, 0, [1, 6])


def test_state_shapes() -> None:
    by_name = {shape.name: shape for shape in SHAPES}
    assert by_name["jamba-1.5-large"].state_shapes() == ((16384, 3), (16384, 16))
    assert by_name["mamba-codestral-7b"].state_shapes() == ((8192 + 2 * 8 * 128, 3), (128, 64, 128))
    assert by_name["mamba-codestral-7b"].state_shapes(16) == ((512 + 2 * 128, 3), (8, 64, 128))
    with pytest.raises(ValueError, match=r"mamba2-2.7b: expected shards that divide 80 heads .* got 3"):
        by_name["mamba2-2.7b"].per_shard(3)

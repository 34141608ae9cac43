"""The gated delta rule over states in pages against numpy's recurrence in float64, and its laws."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cases.states import Arrays, Step
from pallas_kernels.gated_delta_rule import DeltaOutput, gated_delta_rule, reference
from pallas_kernels.gated_delta_rule.arguments import Inputs, Options
from pallas_kernels.gated_delta_rule.cases import DeltaCase
from pallas_kernels.gated_delta_rule.oracle import INPUTS
from pallas_kernels.gated_delta_rule.shapes import SHAPES
from pallas_kernels.state_step import StepArrays
from tests.pallas_kernels.cases import assert_close


def small(
    key_heads: int = 2,
    heads: int = 4,
    key_dim: int = 4,
    value_dim: int = 3,
    per_channel: int = 0,
    tokens: int = 90,
    **options: Any,
) -> DeltaCase:
    """A case of float32 with few numbers; options are those of DeltaCase."""
    sizes = {"key_heads": key_heads, "heads": heads, "key_dim": key_dim, "value_dim": value_dim}
    given = {"seqs": 5, "num_pages": 24, "q_dtype": "float32", "scale": 0.7} | options
    return DeltaCase(tokens=tokens, per_channel=per_channel, **sizes, **given)


SCALAR, CHANNEL = small(), small(per_channel=1)
KINDS = pytest.mark.parametrize("shape", [SCALAR, CHANNEL], ids=["scalar", "channel"])


@functools.cache
def jitted(scale: float | None, use_qk_l2norm: bool) -> Callable[..., DeltaOutput]:
    options = {"scale": scale, "use_qk_l2norm": use_qk_l2norm, "backend": "reference"}
    return jax.jit(functools.partial(gated_delta_rule, **options))


def run(shape: DeltaCase, arrays: Arrays, step: Step) -> DeltaOutput:
    """The op."""
    inputs = (arrays[name] for name in (*INPUTS, "states"))
    return jitted(shape.scale, bool(shape.l2norm))(*inputs, *step)


def run_in_chunks(shape: DeltaCase, arrays: Arrays, step: Step, chunk_tokens: int) -> tuple[Any, Any]:
    """The reference, in chunks of so many tokens."""
    options = Options(shape.scale, bool(shape.l2norm))
    inputs = Inputs(*(jnp.asarray(arrays[name]) for name in INPUTS))
    states = jnp.asarray(arrays["states"])
    return reference.gated_delta_rule(inputs, states, StepArrays(*step), options=options, chunk_tokens=chunk_tokens)


@pytest.mark.parametrize(
    "shape",
    [
        SCALAR,
        CHANNEL,
        small(q_dtype="bfloat16", state_dtype="bfloat16", kept=3),
        small(per_channel=1, l2norm=0, kept=4),
        small(key_heads=1, heads=3, key_dim=1, value_dim=1, tokens=90, q_dtype="float16"),
    ],
    ids=str,
)
@pytest.mark.parametrize("chunk_tokens", [1, 16])
def test_random_steps(shape: DeltaCase, chunk_tokens: int) -> None:
    """Decode, prefill of several chunks, mixed, lengths 0 and 1, drafts with pages of their own, no sequence at all."""
    lengths = ([1, 1, 1, 0, 1], [1, 1, 0, 70, 18], [3, 0, 16, 4, 67], [90], [32, 17, 33, 2], [])
    for seed, q_lens in enumerate(lengths):
        arrays, step = shape.step(np.random.default_rng(seed), q_lens)
        shape.assert_step(run_in_chunks(shape, arrays, step, chunk_tokens), arrays, step)


@pytest.mark.parametrize("chunk_tokens", [2, 64])
def test_chunks_equal_the_recurrence(monkeypatch: pytest.MonkeyPatch, chunk_tokens: int) -> None:
    """Of any size, also where a sequence's last chunk has one token only."""
    monkeypatch.setattr(reference, "_LEAST_TOKENS", 1)
    for shape in (replace(SCALAR, tokens=67), replace(CHANNEL, tokens=67)):  # of their own: traced anew
        arrays, step = shape.step(np.random.default_rng(7), [1, 2, 33, 31])
        shape.assert_step(run_in_chunks(shape, arrays, step, chunk_tokens), arrays, step)


@KINDS
def test_equal_keys_do_not_blow_up(shape: DeltaCase) -> None:
    """Keys that are all one, nothing decayed and everything written: powers of the matrix that is solved are huge."""
    arrays, step = shape.step(np.random.default_rng(3), [90])
    arrays |= {"k": np.ones_like(arrays["k"]), "g": 0 * arrays["g"], "beta": np.ones_like(arrays["beta"])}
    shape.assert_step(run_in_chunks(shape, arrays, step, 64), arrays, step)


@KINDS
def test_a_decay_to_nothing(shape: DeltaCase) -> None:
    """g of minus infinity forgets everything before, in chunks, too."""
    arrays, step = shape.step(np.random.default_rng(4), [30, 60])
    arrays["g"][[5, 40, 41, 89]] = -np.inf
    for chunk_tokens in (1, 32):
        shape.assert_step(run_in_chunks(shape, arrays, step, chunk_tokens), arrays, step)


def test_the_op_takes_chunks_where_states_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways through the op itself; a 1-D `state_write` is a column."""
    shape = replace(SCALAR, tokens=41)
    arrays, step = shape.step(np.random.default_rng(5), [1, 1, 39])
    flat = step._replace(state_write=step.state_write[:, 0])
    expected = run(shape, arrays, step)
    shape.assert_step(expected, arrays, step)
    assert run(shape, arrays, flat).out.tobytes() == expected.out.tobytes()
    monkeypatch.setattr(reference, "_LEAST_NUMBERS", 1)
    jax.clear_caches()
    chunked = run(shape, arrays, flat)
    shape.assert_step(chunked, arrays, step)
    assert chunked.out.tobytes() != expected.out.tobytes()
    jax.clear_caches()


@pytest.mark.parametrize("chunk_tokens", [1, 16])
@KINDS
def test_chunked_prefill_and_decode_equal_the_whole(shape: DeltaCase, chunk_tokens: int) -> None:
    """Steps of any cut, each from the page that the one before wrote, over pages of NaN."""
    arrays = shape.inputs(np.random.default_rng(1))

    def in_steps(counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        states = np.full((4, *shape.state_shape), np.nan, np.float32)
        states[0] = 0
        outs, done, read, write = [], 0, 1, 2
        for count in counts:
            new = {name: np.full_like(array, np.nan) for name, array in arrays.items()}
            for name in INPUTS:
                new[name][:count] = arrays[name][done : done + count]
            ends = [int(count == 1), int(count == 1), 1]
            step = Step(*(np.array(y, np.int32) for y in ([0, count], ends, [read], [[write]])), np.array([done > 0]))
            out, states = run_in_chunks(shape, new | {"states": states}, step, chunk_tokens)
            done, read, write = done + count, write, read
            outs.append(out[:count])
        return np.concatenate(outs), np.asarray(states)[read]

    whole, last = in_steps([shape.tokens])
    for counts in ([1, 1, 16, 33, 1, 38], [30] * 3):
        out, state = in_steps(counts)
        assert_close(out, whole.astype(np.float64), "float32", "out")
        assert_close(state, last.astype(np.float64), "float32", "state")


@KINDS
def test_speculation_goes_on_from_what_was_accepted(shape: DeltaCase) -> None:
    """Steps of a token and drafts, some rejected; the next one reads column L - 1 - rejected: as without drafts."""
    num_kept, num_tokens = 4, 20
    rng = np.random.default_rng(2)
    arrays = shape.inputs(rng)
    prompt = Step(*(np.array(y, np.int32) for y in ([0, num_tokens], [0, 0, 1], [0], [[0]])), np.array([False]))
    states = np.zeros((num_kept + 1, *shape.state_shape), np.float32)
    plain = {name: arrays[name][:num_tokens] for name in INPUTS} | {"states": states}
    expected = np.asarray(run_in_chunks(shape, plain, prompt, 1)[0])
    done, read = 0, 1
    while done < num_tokens:
        drafts = int(min(rng.integers(0, num_kept), num_tokens - done - 1))
        rejected = int(rng.integers(0, drafts + 1))
        new = {name: arrays[name][rng.permutation(num_tokens)][:num_kept] for name in INPUTS}
        accepted = 1 + drafts - rejected
        for name in INPUTS:
            new[name][:accepted] = arrays[name][done : done + accepted]
        write = rng.permutation(np.arange(1, num_kept + 1))[None]
        write[:, : num_kept - 1 - drafts] = 0
        ends = [0, 0, 1]
        step = Step(*(np.array(y, np.int32) for y in ([0, 1 + drafts], ends, [read], write)), np.array([done > 0]))
        out, states = run_in_chunks(shape, new | {"states": states}, step, 1)
        assert_close(out[:accepted], expected[done : done + accepted].astype(np.float64), "float32", "out")
        done, read = done + accepted, write[0, num_kept - 1 - rejected]


@pytest.mark.parametrize("chunk_tokens", [1, 16])
def test_chunks_end_at_checkpoints(chunk_tokens: int) -> None:
    """At any lengths of some sequences, beside decode rows and states kept for drafts."""
    shape = replace(CHANNEL, checkpoints=3, kept=3, num_pages=60)
    for seed, q_lens in enumerate([[1, 1, 0, 70, 18], [3, 0, 16, 4, 67], [90], [32, 17, 33, 2], []]):
        arrays, step = shape.step(np.random.default_rng(seed), q_lens)
        shape.assert_step(run_in_chunks(shape, arrays, step, chunk_tokens), arrays, step)


@KINDS
def test_a_state_of_the_wrong_length_is_seen(shape: DeltaCase) -> None:
    """The planted fault of prefix caching: a hit that starts from the state a token early or late, or from none.

    Each gives other outputs than the right state does, by far more than the tolerance of these tests.
    """
    arrays = shape.inputs(np.random.default_rng(6))
    pages = np.arange(1, 4)[None]
    step = Step(*(np.array(y, np.int32) for y in ([0, 60], [0, 0, 1], [0])), pages.astype(np.int32), np.array([False]))
    states = np.zeros((5, *shape.state_shape), np.float32)
    whole, _ = run_in_chunks(shape, arrays | {"states": states}, step, 16)
    before = step._replace(query_start_loc=np.array([0, 41], np.int32))
    _, kept = run_in_chunks(shape, arrays | {"states": states}, before, 16)  # after 39, 40 and 41 tokens
    rest = {name: np.roll(arrays[name], -40, axis=0) for name in INPUTS}  # from token 40 on
    hit = Step(*(np.array(y, np.int32) for y in ([0, 20], [0, 0, 1], [2], [[0, 0, 4]])), np.array([True]))
    for has_initial, page, is_right in ((True, 2, True), (True, 1, False), (True, 3, False), (False, 2, False)):
        other = hit._replace(state_read=np.array([page], np.int32), has_initial_state=np.array([has_initial]))
        out, _ = run_in_chunks(shape, rest | {"states": np.asarray(kept)}, other, 16)
        difference = np.abs(np.asarray(out[:20]) - np.asarray(whole[40:60])).max()
        assert (difference < 1e-5) == is_right, difference
        assert is_right or difference > 1e-3


@pytest.mark.parametrize("chunk_tokens", [1, 16])
@KINDS
def test_what_is_not_finite_stays_in_its_sequence(shape: DeltaCase, chunk_tokens: int) -> None:
    """A sequence whose inputs are not finite changes no bit of the others."""
    arrays, step = shape.step(np.random.default_rng(2), [1, 5, 40, 30, 1])
    clean = run_in_chunks(shape, arrays, step, chunk_tokens)
    for row in (1, 2):
        tokens = step.tokens(row)
        dirty = {name: array.copy() for name, array in arrays.items()}
        dirty["v"][tokens.start], dirty["g"][tokens.stop - 1], dirty["k"][tokens.stop - 1] = np.nan, np.inf, np.inf
        out, states = run_in_chunks(shape, dirty, step, chunk_tokens)
        others = np.setdiff1d(np.arange(77), np.arange(shape.tokens)[tokens])
        np.testing.assert_array_equal(out[others], clean[0][others])
        pages = np.setdiff1d(np.arange(shape.num_pages), step.state_write[row])
        np.testing.assert_array_equal(states[pages], clean[1][pages])
        assert np.isnan(np.asarray(out)[tokens]).any()


def test_the_null_page_is_never_written() -> None:
    """A row without a page to write computes its outputs all the same."""
    arrays, step = SCALAR.step(np.random.default_rng(4), [4, 1])
    got = run(SCALAR, arrays, step._replace(state_write=np.zeros_like(step.state_write)))
    np.testing.assert_array_equal(got.out, run(SCALAR, arrays, step).out)
    np.testing.assert_array_equal(got.states, arrays["states"])


def test_the_default_scale() -> None:
    """1 over the root of the key's numbers."""
    shape = replace(SCALAR, scale=SCALAR.key_dim**-0.5)
    arrays, step = shape.step(np.random.default_rng(4), [4, 1])
    inputs = (arrays[name] for name in (*INPUTS, "states"))
    shape.assert_step(jitted(None, True)(*inputs, *step), arrays, step)


@pytest.mark.parametrize("name", [model.name for model in SHAPES])
def test_model_shape(name: str) -> None:
    """bfloat16 inputs over float32 states, one shard of eight; a decode row and a prefill in chunks."""
    (model,) = (shape for shape in SHAPES if shape.name == name)
    key_heads, value_heads = model.per_shard(8)
    shape = small(
        key_heads,
        value_heads,
        model.key_dim,
        model.value_dim,
        model.is_per_channel,
        tokens=12,
        q_dtype="bfloat16",
        num_pages=8,
        seqs=2,
    )
    assert model.state_shapes(8)[1] == shape.state_shape
    arrays, step = shape.step(np.random.default_rng(0), [1, 11])
    shape.assert_step(run(shape, arrays, step), arrays, step)


def test_state_shapes() -> None:
    by_name = {shape.name: shape for shape in SHAPES}
    assert by_name["qwen3-next-80b-a3b"].state_shapes() == ((2 * 16 * 128 + 32 * 128, 3), (32, 128, 128))
    assert by_name["qwen3.5-27b"].state_shapes(4) == ((2 * 4 * 128 + 12 * 128, 3), (12, 128, 128))
    assert by_name["kimi-linear-48b-a3b"].state_shapes(32) == ((3 * 128, 3), (1, 128, 128))
    assert by_name["qwen3-next-80b-a3b"].per_shard(32) == (1, 1)
    with pytest.raises(ValueError, match=r"qwen3.5-27b: expected shards that divide 48 value heads .* got 5"):
        by_name["qwen3.5-27b"].per_shard(5)

"""The TPU kernel of ring_delta_rule against numpy's recurrence: ragged steps, NaN wherever nobody may look, races."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cases.case import Results
from pallas_kernels.cases.compare import assert_same
from pallas_kernels.cases.in_slabs import in_slabs
from pallas_kernels.interpret import compile_for
from pallas_kernels.interpret.on_tpu import RaceError, tpu_device
from pallas_kernels.ring_delta_rule import tpu_rule
from pallas_kernels.ring_delta_rule.arguments import DeltaRing
from pallas_kernels.ring_delta_rule.cases import RingDeltaCase
from pallas_kernels.ring_delta_rule.tpu_moves import STATES, Moves
from pallas_kernels.ring_delta_rule.validate import check_options
from pallas_kernels.tpu.mosaic import Copy
from tests.pallas_kernels.ring_delta_rule.test_ring_delta_rule import SMALL

SCALAR = dataclasses.replace(
    SMALL, key_heads=4, heads=8, key_dim=128, value_dim=128, slots=4, most_new=2, num_pages=24, q_dtype="bfloat16"
)
CHANNEL = dataclasses.replace(SCALAR, key_heads=2, heads=2, per_channel=1, q_dtype="float32")
# Several tiles of heads of a key head, and of key heads; states of two bytes; entries of two.
GROUPED = dataclasses.replace(SCALAR, key_heads=1, heads=16, most_new=1, l2norm=0)
TILED = dataclasses.replace(CHANNEL, key_heads=16, heads=16, state_dtype="bfloat16")
ROUNDED = dataclasses.replace(CHANNEL, key_heads=1, delta_dtype="bfloat16", decay_dtype="bfloat16", q_dtype="bfloat16")
WIDE = dataclasses.replace(SCALAR, key_dim=256, value_dim=128, heads=4, most_new=4, key_heads=2)
CASES = {"scalar": SCALAR, "channel": CHANNEL, "grouped": GROUPED, "tiled": TILED, "rounded": ROUNDED, "wide": WIDE}
QUICK = ("scalar", "channel")
LENGTHS = ([1, 1, 1, 1, 1, 1], [1, 0, 2, 5, 2, 1], [2], [])


@cache
def compiled(case: RingDeltaCase) -> Callable[..., Any]:
    """(pages, rest) -> (outs, pages)."""
    return compile_for("tpu", partial(case.call, "tpu"), *case.as_arguments(*case.step(np.random.default_rng(0), [])))


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.sweep] * (x not in QUICK)) for x in CASES])
def test_equals_the_recurrence(name: str) -> None:
    """Decode, drafts, sequences of too many tokens, prefixes that several read, one sequence alone, none."""
    case = CASES[name]
    for seed, q_lens in enumerate(LENGTHS):
        arrays, step = case.step(np.random.default_rng(seed), q_lens)
        case.assert_step(Results(*compiled(case)(*case.as_arguments(arrays, step))), arrays, step)


@pytest.mark.parametrize("case", [SCALAR, CHANNEL], ids=["scalar", "channel"])
def test_float32_states_are_seen_exactly(case: RingDeltaCase) -> None:
    """Outputs of float32 are as close as float32 is, where states and keys are of many sizes."""
    case = dataclasses.replace(case, q_dtype="float32", most_new=1)
    rng = np.random.default_rng(3)
    arrays, step = case.step(rng, [1, 1, 1])
    arrays["states"] *= (10.0 ** rng.integers(-6, 1, arrays["states"].shape)).astype(np.float32)
    case.assert_step(Results(*compiled(case)(*case.as_arguments(arrays, step))), arrays, step)


@pytest.mark.parametrize("case", [SCALAR, CHANNEL], ids=["scalar", "channel"])
def test_arrays_of_one_column_stay_in_one_memory(case: RingDeltaCase) -> None:
    """What a call writes is in the memory of each result."""
    rng = np.random.default_rng(7)
    case = dataclasses.replace(case, slots=32 if not case.per_channel else 4)
    given = case.as_arguments(*case.step(rng, [1, 2, 1]))
    placed = in_slabs(given, rng, packs=True, blocks_per_slab=8)
    expected = compile_for("tpu", partial(case.call, "tpu"), *given)(*given)
    _, found = compile_for("tpu", partial(case.call, "tpu"), *placed)(*placed)
    memory = found[-1].memory
    for array, right in zip(found, expected[1], strict=True):
        here = dataclasses.replace(array, memory=jnp.asarray(memory))[jnp.arange(case.num_pages)]
        assert_same(here, right)


def _into_the_state_in_use(self: Moves, page: jax.Array, step: jax.Array, *, comes: bool) -> Copy:
    slot = lax.rem(step + comes * (STATES - 1), STATES)
    left, came = self.semaphores.states_left.at[slot], self.semaphores.states_came.at[slot]
    if comes:
        return pltpu.make_async_copy(self.states.at[page], self.base.at[slot], came)
    return pltpu.make_async_copy(self.base.at[slot], self.states.at[page], left)


@pytest.mark.skipif(tpu_device() is not None, reason="races are seen by the interpreter only")
def test_a_planted_race_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """States loaded into the buffer in use: a race is reported."""
    monkeypatch.setattr(Moves, "_state", _into_the_state_in_use)
    case = dataclasses.replace(SCALAR, seqs=5)
    arrays, step = case.step(np.random.default_rng(1), [1, 1, 1, 1])
    arrays["states"][:] = 1
    arguments = case.as_arguments(arrays, step)
    jax.clear_caches()
    with pytest.raises(RaceError, match=r"race|RACE"):
        compile_for("tpu", partial(case.call, "tpu"), *arguments)(*arguments)
    jax.clear_caches()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"state_dtype": "float16"}, "TPU has no arithmetic on float16"),
        ({"delta_dtype": "float16"}, "TPU has no arithmetic on float16"),
        ({"key_dim": 64}, "takes keys and values in multiples of 128, got 64 and 128"),
        ({"slots": 12, "most_new": 9}, "takes up to 8 new tokens of a sequence, got 9"),
    ],
)
def test_what_the_kernel_cannot_do(change: dict[str, Any], reason: str) -> None:
    case = dataclasses.replace(SCALAR, **change)
    arguments = case.as_arguments(*case.step(np.random.default_rng(1), [1, 1, 1]))
    with pytest.raises(NotImplementedError, match=f"ring_delta_rule: .*{reason}"):
        case.call("tpu", *arguments)


def test_decays_of_heads_fill_rows_of_slabs() -> None:
    """Else XLA would copy the memory for them."""
    case = SCALAR
    pages = in_slabs(
        case.as_arguments(*case.step(np.random.default_rng(1), [1])), np.random.default_rng(1), packs=True, rest=7
    ).pages
    states, *ring = pages
    options = check_options(case.key_dim, None, True, 1)
    reason = tpu_rule.reason_not_supported(jnp.zeros((1, 8, 128)), jnp.zeros((1, 8)), states, DeltaRing(*ring), options)
    assert reason is not None
    assert "make the ring longer" in reason

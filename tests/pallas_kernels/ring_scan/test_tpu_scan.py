"""The TPU kernel of ring_scan, interpreted: tiles of heads, rows of heads, pages in one column, and what it refuses."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cases.case import Arguments, Results
from pallas_kernels.cases.in_slabs import apart, in_slabs
from pallas_kernels.interpret import compile_for
from pallas_kernels.ring_scan import tpu_ring
from pallas_kernels.ring_scan.cases import RingScanCase
from pallas_kernels.slab_pages import SlabColumn

SIZES: dict[str, Any] = {"tokens": 12, "seqs": 4, "slots": 8, "most_new": 2, "num_pages": 9}
SMALL = RingScanCase(**SIZES, heads=4, groups=2)
CASES = {
    "bfloat16": SMALL,
    "float32": dataclasses.replace(SMALL, q_dtype="float32"),
    "tiles": dataclasses.replace(SMALL, heads=64, most_new=1),
    "tiles_of_groups": dataclasses.replace(SMALL, heads=96, head_dim=64, groups=6),
    "rows_that_fill_no_tile": dataclasses.replace(SMALL, heads=20, head_dim=64, groups=1),
    "rows_of_heads": dataclasses.replace(SMALL, heads=192, head_dim=32, groups=3, state_dim=256),
}
LENGTHS = ([1, 1, 1], [1, 2, 0, 4])


def run(case: RingScanCase, *arguments: Arguments) -> list[Results]:
    """Of steps of the same shapes, races watched."""
    call = compile_for("tpu", partial(case.call, "tpu"), *arguments[0])
    return [Results(*call(*step)) for step in arguments]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.sweep] * (name == "float32")) for name in CASES]
)
def test_equals_the_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are small here; the largest buffer that is allowed holds 32 heads of 64 numbers, or 64 of 32."""
    case = CASES[name]
    monkeypatch.setattr(tpu_ring, "_BUFFER_BYTES", 32 * 64 * case.state_dim * 4)
    steps = [case.step(np.random.default_rng(seed), q_lens) for seed, q_lens in enumerate(LENGTHS)]
    found = run(case, *(case.as_arguments(*step) for step in steps))
    for results, step in zip(found, steps, strict=True):
        case.assert_step(results, *step)


def test_tiles() -> None:
    """All heads where they fill one buffer at most, else some that lie in one row of 128 heads."""
    head_bytes = 64 * 128 * 4
    assert tpu_ring.tile_of(80, 1, 64, head_bytes) == 80
    assert tpu_ring.tile_of(128, 8, 64, head_bytes) == 128
    assert tpu_ring.tile_of(256, 8, 64, head_bytes) == 128
    assert tpu_ring.tile_of(256, 1, 64, head_bytes // 2) == 128
    assert tpu_ring.tile_of(160, 1, 64, head_bytes) == 32
    assert tpu_ring.tile_of(10, 1, 64, head_bytes) == 10
    assert tpu_ring.tile_of(130, 1, 64, head_bytes) is None


def test_one_column_stays_in_one_memory() -> None:
    """Pages in slabs of one memory, as an engine has them: what a call writes is in the memory of each result."""
    rng = np.random.default_rng(7)
    step = SMALL.step(rng, [1, 2, 4])
    given = SMALL.as_arguments(*step)
    placed = in_slabs(given, rng, packs=True, blocks_per_slab=2)
    rows = placed.pages.memory.shape[1]  # type: ignore[attr-defined]
    placed = in_slabs(given, rng, packs=True, blocks_per_slab=2, rest=-rows % 8)

    def column_after(column: Any, rest: Any) -> Any:
        results = SMALL.call("tpu", column, rest)
        last: Any = results.pages[-1]
        return results.outs, SlabColumn(last.memory, column.places)

    found = Results(*compile_for("tpu", column_after, *placed)(*placed))
    column = SlabColumn(jnp.asarray(found.pages.memory), placed.pages.places)  # type: ignore[attr-defined]
    SMALL.assert_step(apart(Results(found.outs, tuple(column)), SMALL.num_pages), *step)


REFUSED = {
    "float16": ({"q_dtype": "float16"}, "TPU has no arithmetic on float16"),
    "natural": ({"in_rows": 0}, r"TPU kernels take ring.xs with slots \(2, 128\), see ring_page_shapes, got \(4, 64\)"),
    "slots": ({"slots": 12}, "rings of multiples of 8 slots, .* got 12 slots and max_new_tokens 2"),
    "pairs": ({"slots": 64, "most_new": 3}, "up to 128 pairs .* got 64 slots and max_new_tokens 3"),
    "state": ({"state_dim": 64}, "states in multiples of 128 and heads of 8, .* got 64 and 64"),
    "head": ({"head_dim": 48}, "heads of 8, 16, 32, 64 or 128, got 128 and 48"),
    "groups": ({"groups": 4}, "groups of whole rows of 128 numbers, got 1 heads of 64"),
    "tile": ({"heads": 130, "groups": 1}, "no tile of 130 heads of 64 x 128 fits VMEM"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_kernel_cannot_do(change: dict[str, Any], message: str) -> None:
    case = dataclasses.replace(SMALL, **change)
    arguments = case.as_arguments(*case.step(np.random.default_rng(0), [1, 1]))
    with pytest.raises(NotImplementedError, match=f"ring_scan: .*{message}"):
        case.call("tpu", *arguments)

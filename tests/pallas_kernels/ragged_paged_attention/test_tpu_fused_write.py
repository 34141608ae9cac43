"""Laws of the write in the TPU kernel's decode launch: blocks start early, none before its pages are written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import launches
from pallas_kernels.interpret.on_tpu import RaceError, compile_on_tpu, tpu_device
from pallas_kernels.kv_write.kernel_tpu import written_pages
from pallas_kernels.mask import MaskRule
from pallas_kernels.ragged_paged_attention import kernel_tpu
from pallas_kernels.ragged_paged_attention.oracle import Options
from pallas_kernels.ragged_paged_attention.tpu_ring import BlockRing
from pallas_kernels.schedule import Batch
from tests.pallas_kernels.cases import Case, Shape, make_case, random_values
from tests.pallas_kernels.ragged_paged_attention.test_kernel_tpu import assert_right

PAGE = 16
SHAPE = Shape(
    num_tokens=4, num_rows=4, num_columns=40, page_size=PAGE, num_q_heads=2, num_kv_heads=2, head_dim=128,
    q_dtype="bfloat16", kv_dtype="bfloat16", platform="tpu",
)  # fmt: skip
TUNING = kernel_tpu.Tuning(queries=8, decode_block=128, tile_block=128, decode_buffers=4)
NEW_KV = tuple(random_values(np.random.default_rng(0), (4, 2, 128), "bfloat16") for _ in range(2))

# Name: (lengths of sequences of one new token, the column of the first one's table that the second one writes,
# how many of the four first blocks of 128 tokens have no page that is written).
STEPS: dict[str, tuple[Sequence[int], int | None, int]] = {
    "one token": ([1, 300], None, 0),
    "whole block": ([128, 300], None, 0),
    "first page": ([300, 16], 0, 0),
    "third block": ([600, 320, 1], 19, 2),
    "fifth block": ([640, 528, 1, 1], 33, 4),
}


def make_step(name: str, options: Options) -> tuple[Case, np.ndarray]:
    """(the step, its slot mapping): every row writes its last token, whose slot is NaN before."""
    lengths, shared_column, _ = STEPS[name]
    case = make_case(3, SHAPE, [(1, n) for n in lengths], options)
    if shared_column is not None:
        case.block_tables[1, (lengths[1] - 1) // PAGE] = case.block_tables[0, shared_column]
    slots = np.full(SHAPE.num_tokens, -1, np.int32)
    for row, length in enumerate(lengths):
        place = length - 1
        slots[row] = case.block_tables[row, place // PAGE] * PAGE + place % PAGE
        case.pages[0][slots[row] // PAGE, slots[row] % PAGE] = np.nan
    return case, slots


def after(case: Case, slots: np.ndarray) -> Case:
    """The step with its new KV in the pages."""
    written = dataclasses.replace(case, pages=tuple(p.copy() for p in case.pages))
    for t in np.flatnonzero(slots >= 0):
        written.pages[0][slots[t] // PAGE, slots[t] % PAGE] = np.stack([NEW_KV[0][t], NEW_KV[1][t]], axis=1)
    return written


def compiled(options: Options, *, tables_in_hbm: bool = False) -> Callable[..., Any]:
    """The kernel with the write: (arrays, slots) -> (out, lse, pages)."""
    mask = MaskRule(options.causal, options.sliding_window, options.attention_chunk_size, options.num_sink_tokens)

    def step(slots: jax.Array, *arrays: Any) -> Any:
        return kernel_tpu.ragged_paged_attention(
            *arrays, mask=mask, num_kv_heads=2, sm_scale=options.sm_scale, soft_cap=None, sinks=None, k_scale=None,
            v_scale=None, return_lse=True, new_kv=tuple(jnp.asarray(x) for x in NEW_KV), slot_mapping=slots,
            tuning=TUNING, tables_in_hbm=tables_in_hbm,
        )  # fmt: skip

    case, slots = make_step("one token", options)
    return compile_on_tpu(step, jnp.asarray(slots), *case.arrays)


@pytest.fixture(autouse=True)
def _decode_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launch of tiles is compiled: every row here decodes."""

    def of_decoding(decoded: launches.Result, _: object, decoding: Batch, others: Batch) -> launches.Result:
        return launches.by_token(decoded, decoded, decoding, others)

    monkeypatch.setattr(launches, "with_tiles", of_decoding)
    jax.clear_caches()


def check(run: Callable[..., Any], name: str, options: Options) -> None:
    """Pages, results and LSE of a step are those of new KV written first."""
    case, slots = make_step(name, options)
    out, lse, pages = run(jnp.asarray(slots), *case.arrays)
    written = after(case, slots)
    np.testing.assert_array_equal(pages.view(np.uint8), written.pages[0].view(np.uint8), err_msg=name)
    assert_right((out, lse), written, options)


@pytest.mark.sweep
def test_every_sequence_sees_what_the_step_writes_with_tables_in_hbm() -> None:
    """With sink tokens, whose pages lie before the window's."""
    options = Options(sliding_window=400, num_sink_tokens=20)
    run = compiled(options, tables_in_hbm=True)
    for name in ("one token", "third block"):
        check(run, name, options)


@pytest.mark.skipif(tpu_device() is not None, reason="a chip tells nobody how many blocks it starts early")
def test_blocks_start_early_up_to_one_with_a_written_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of blocks that are started before the write is waited for; results are right."""
    found: list[int] = []
    fill_before = BlockRing.fill_before

    def tell(self: BlockRing, written: Any) -> jax.Array:
        count = fill_before(self, written)
        jax.debug.callback(lambda n: found.append(int(n)), count)
        return count

    monkeypatch.setattr(BlockRing, "fill_before", tell)
    run = compiled(Options())
    for name, (*_, expected) in STEPS.items():
        found.clear()
        check(run, name, Options())
        assert found == [expected], name
    jax.clear_caches()


@pytest.mark.skipif(tpu_device() is not None, reason="races are seen by the interpreter only")
def test_a_block_that_starts_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks started whatever is written: a race is reported."""
    monkeypatch.setattr(BlockRing, "_next_has_any", lambda self, pages: jnp.bool_(False))
    case, slots = make_step("one token", Options())
    with pytest.raises(RaceError, match=r"race|RACE"):
        compiled(Options())(jnp.asarray(slots), *case.arrays)
    jax.clear_caches()


def test_written_pages_are_those_of_the_slots_that_are_written() -> None:
    """Page 0 and -1 apart; padded to whole registers."""
    pages = np.asarray(written_pages(jnp.array([15, -1, 16, 47, 40], jnp.int32), PAGE))
    assert pages.shape == (8, 128)
    assert pages.reshape(-1)[:5].tolist() == [-1, -1, 1, 2, 2]
    assert (pages.reshape(-1)[5:] == -1).all()
    assert written_pages(jnp.zeros(1025, jnp.int32), PAGE).shape == (16, 128)

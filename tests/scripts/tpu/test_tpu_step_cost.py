"""What launches cost by listings of known sizes: ours by its own plan, rivals by the shapes of their loops."""

from __future__ import annotations

import pytest

from pallas_kernels.mask import MaskRule
from scripts.lab.tpu.bundles import Kernel
from scripts.lab.tpu.chips import CHIPS
from scripts.lab.tpu.latency import Ring
from scripts.lab.tpu.rival_cost import Sizes, blocking_spills, decode_work, prefill_bundles, sizes_of
from scripts.lab.tpu.score import block_scores
from scripts.lab.tpu.step_cost import DECODE, TILES, Item, LaunchSizes, items_of, launch_work, workloads
from tests.scripts.tpu.tpu_listing import PRODUCT, START, STORE, WAIT, kernel, loop, skip

FOUR_PAGES = loop(*[START] * 4, 1)  # 10 bundles a trip
ONE_PAGE = loop(START, 2)  # 8
# 40 bundles for the first item alone, and the 5 of their branch; 3 + 5 for each item, and 5 to end the loop.
ITEM = (3, skip(START, 39))
FULL = loop(START, WAIT, PRODUCT, 42)  # 50
MASKED = loop(2, FOUR_PAGES, ONE_PAGE, WAIT, PRODUCT, 61)  # 70 beside the loops over pages


def two_loops(name: str) -> Kernel:
    return kernel(name, loop(*ITEM, FULL, MASKED))


def three_loops(name: str) -> Kernel:
    """The grid's loop: 6 bundles beside items and what the first step runs; the item's: 4 and 5."""
    inside = loop(WAIT, PRODUCT, 42, START)  # 50
    other = loop(WAIT, PRODUCT, 43, FOUR_PAGES, ONE_PAGE)  # 50 beside loops over pages
    cut = loop(WAIT, PRODUCT, 63, FOUR_PAGES, ONE_PAGE)  # 70
    return kernel(name, loop(6, skip(START, 39), loop(4, inside, other, cut)))


def test_items_are_those_of_the_kernels_plan() -> None:
    decode = LaunchSizes(MaskRule(), 1, 128, 512)
    assert items_of(decode, [(1000, 1), (2048, 1), (130, 1)]) == [Item(1, 2, 8), Item(4, 4, 16), Item(0, 1, 2)]
    assert Item(1, 2, 7).pages(4) == [4, 3]
    assert Item(0, 0, 0).pages(4) == []
    tiles = LaunchSizes(MaskRule(), 32, 128, 512)
    assert items_of(tiles, [(1024, 64)]) == [Item(1, 2, 8), Item(1, 2, 8)]


@pytest.mark.parametrize(
    ("tokens", "blocks", "starts"),
    [
        (2048, 3 * 50 + 70, 10),  # three whole blocks; the last starts four pages of the next sequence
        (256, 70, 2 * 8),
        (700, 2 * 70, 10 + 2 * 8),  # the last full block is a masked one; each starts the other's pages
    ],
)
def test_a_sequence_of_a_kernel_of_two_loops(tokens: int, blocks: int, starts: int) -> None:
    work = launch_work(two_loops("rpa_q1_b512_p128_t1"), MaskRule(), 4096, [(tokens, 1)])
    assert work.bundles == 13 + blocks + starts
    pages = -(-tokens // 128)
    assert (work.steps, work.num_bytes, work.ring) == (-(-tokens // 512), pages * 128 * 4096, Ring(2))


@pytest.mark.parametrize(
    ("tokens", "blocks", "starts"),
    [
        (2048, 2 * 50 + 2 * 50, 2 * 10),  # the last two start the next sequence's first blocks
        (256, 70, 2 * 8),
        (700, 50 + 70, 10 + 2 * 8),
    ],
)
def test_a_sequence_of_a_kernel_of_three_loops(tokens: int, blocks: int, starts: int) -> None:
    """A block starts the one that comes two later; the grid's own bundles are shared by eight items."""
    work = launch_work(three_loops("rpa_q1_b512_p128_t1_n2"), MaskRule(), 4096, [(tokens, 1)])
    assert work.bundles == (6 + 5 + 5) / 8 + (4 + 5) + blocks + starts


def test_bundles_of_many_sequences_add_up() -> None:
    """A launch of one length many times over costs as many times as much: what it starts goes round."""
    found = three_loops("rpa_q1_b512_p128_t1_n4")
    one, many = (launch_work(found, MaskRule(), 4096, [(3000, 1)] * count) for count in (1, 5))
    assert many.bundles == 5 * one.bundles
    assert (many.steps, many.num_bytes) == (5 * one.steps, 5 * one.num_bytes)


def test_a_whole_prefill() -> None:
    """Tiles of 32 queries: of 16 that end in the same block, all but the last full one are unmasked."""
    work = launch_work(two_loops("rpa_q32_b512_p128_t1"), MaskRule(), 4096, [(1024, 1024)])
    assert work.steps == 16 * (1 + 2)
    tiles = [range(0, 512, 32), range(512, 1024, 32)]
    pages = [[-(-(first + 32) // 128) for first in some] for some in tiles]
    blocks = [[some] for some in pages[0]] + [[4, some - 4] for some in pages[1]]
    starts = sum(10 * (some // 4) + 8 * (some % 4) for item in blocks for some in item)
    assert work.bundles == 32 * 13 + 16 * 3 * 70 + starts


@pytest.mark.parametrize(("tokens", "expected"), [(512, 4), (384, 3), (129, 2), (128, 1)])
def test_parts_of_a_cut_block_run_as_far_as_it_has_tokens(tokens: int, expected: int) -> None:
    """Regions of equal products, one for each quarter of a block; of 20 bundles, 5 more for the branch always run."""
    parts = [skip(PRODUCT, 19)] * 4
    found = kernel("rpa_q1_b512_p128_t1", loop(9, loop(PRODUCT), loop(WAIT, *parts)))
    work = launch_work(found, MaskRule(), 4096, [(tokens, 1)])
    assert work.bundles == (9 + 5) + (1 + 5) + 4 * 5 + expected * 20
    assert block_scores(found, CHIPS["v7x"], 4096)[1].bundles == (1 + 5) + 4 * (5 + 20)


def test_equal_products_may_fill_unequal_numbers_of_bundles() -> None:
    """Two products in a bundle are two: both halves of the block run."""
    parts = [skip(PRODUCT, PRODUCT, 18), skip(f"{PRODUCT} ;; {PRODUCT}", 19)]
    found = kernel("rpa_q1_b512_p128_t1", loop(9, loop(PRODUCT), loop(WAIT, *parts)))
    assert launch_work(found, MaskRule(), 4096, [(512, 1)]).bundles == (9 + 5) + (1 + 5) + 2 * 5 + 2 * 20


@pytest.mark.parametrize(("tokens", "expected"), [(512, 50), (257, 50), (256, 20), (128, 20)])
def test_short_blocks_have_code_of_their_own(tokens: int, expected: int) -> None:
    """Of two regions of unequal products one runs: the first where half a block is enough."""
    found = kernel(
        "rpa_q1_b512_p128_t1",
        loop(9, loop(PRODUCT), loop(WAIT, skip(PRODUCT, 19), skip(PRODUCT, PRODUCT, 48))),
    )
    work = launch_work(found, MaskRule(), 4096, [(tokens, 1)])
    assert work.bundles == (9 + 5) + (1 + 5) + 2 * 5 + expected
    assert block_scores(found, CHIPS["v7x"], 4096)[1].bundles == (1 + 5) + 2 * 5 + 50


def test_heads_that_are_not_unrolled_in_code_that_is_chosen() -> None:
    """A loop over heads inside the region that is left out is left out with all its trips."""
    short, whole = skip(1, loop(PRODUCT, 4)), skip(1, loop(PRODUCT, PRODUCT, 13))  # 10 and 20 a trip
    found = kernel("rpa_q1_b512_p128_t3", loop(9, loop(PRODUCT), loop(WAIT, short, whole)))
    assert launch_work(found, MaskRule(), 4096, [(256, 1)]).bundles == (9 + 5) + (1 + 5) + 2 * 5 + 1 + 3 * 10
    assert launch_work(found, MaskRule(), 4096, [(512, 1)]).bundles == (9 + 5) + (1 + 5) + 2 * 5 + 1 + 3 * 20


def test_workloads_by_kind_of_kernel() -> None:
    assert workloads(two_loops("rpa_q1_b512_p128_t1")) == DECODE
    assert workloads(two_loops("rpa_q32_b512_p128_t1")) == TILES


def test_a_sequence_of_rpa_v3() -> None:
    """A block's own bundles, its parts', what writes new KV once; the first sequence's start is left out."""
    part = loop(PRODUCT, 34)  # 40
    blocks = loop(WAIT, 9, skip("%1 = dma.vmem_to_hbm", 19), part, 5)
    found = kernel("RPAd-p_128-bq_1_1-bkv_1024_512", loop(2, skip(START, 29), blocks, 7))
    own, block = 2 + 5 + 7 + 5, 10 + 5 + 5 + 5
    for tokens, num_blocks, parts in ((8192, 8, 16), (300, 1, 1), (1100, 2, 3)):
        work = decode_work("rpa_v3", found, 4096, tokens)
        assert work.bundles == own + num_blocks * block + parts * 40 + 20
        assert (work.steps, work.ring, work.num_bytes) == (num_blocks, Ring(2), tokens * 4096)
    # Tiles of one query: 512 see one part, 88 two; and each what the loops have beside.
    assert prefill_bundles("rpa_v3", found, 600) == (512 + 88 * 2) * 40 + 600 * (own + block + 20 + 30)


def test_a_sequence_of_batched() -> None:
    step = loop(WAIT, PRODUCT, "%1 = dma.hbm_to_smem %2", 72)
    found = kernel("RPAd-p128-b8-q1-k256", step)
    work = decode_work("batched", found, 4096, 1000)
    assert (work.bundles, work.steps, work.ring) == (80 * 4 / 8, 4 / 8, Ring(3))
    assert blocking_spills(found) == 1


def test_a_prefill_of_batched() -> None:
    """Tiles of 256 queries and blocks of 256 tokens; results leave once a tile."""
    step = loop(WAIT, 40, PRODUCT, skip(*[STORE] * 101, 9))
    found = kernel("RPAm-p128-b2-q256-k256", step)
    assert prefill_bundles("batched", found, 1024) == (1 + 2 + 3 + 4) * (42 + 5 + 5) / 2 + 4 * 110 / 2


def test_a_sequence_of_stacked() -> None:
    """Two blocks a step: what stitches, reduces, merges, saves and emits runs as often as blocks ask for."""
    stitch = [skip(*[STORE] * 4, 6), skip(*[STORE] * 4, 10)]  # 10 and 14
    reduce, merge, save, emit = (skip(STORE, n - 1) for n in (20, 6, 8, 30))
    found = kernel("RPAd-p128-b2-q1-k256", loop(*stitch, PRODUCT, 50, PRODUCT, reduce, merge, save, emit))
    base = 2 * 5 + 52 + 4 * 5 + 5
    for tokens, steps, reductions, carries, emits in (
        (256, 0.5, 0, 0, 0.5),
        (512, 1, 1, 0, 1),
        (1024, 2, 2, 1, 1),
    ):
        work = decode_work("stacked", found, 4096, tokens)
        assert work.bundles == steps * base + 12 + reductions * 20 + carries * (6 + 8) + emits * 30
        assert work.steps == steps
    with pytest.raises(ValueError, match="expected regions that stitch, reduce, merge and emit, got 0"):
        decode_work("stacked", kernel("RPAd-p128-b2-q1-k256", loop(PRODUCT, 50)), 4096, 256)


def test_names_of_rivals() -> None:
    assert sizes_of("RPAm-p_128-bq_32_32-bkv_2048_512") == Sizes(32, 2048, 512)
    assert sizes_of("RPAd-p128-b8-q1-k256") == Sizes(1, 256, 256, 8)
    with pytest.raises(ValueError, match=r"expected a kernel called RPA.*, got 'rpa_q1'"):
        sizes_of("rpa_q1")

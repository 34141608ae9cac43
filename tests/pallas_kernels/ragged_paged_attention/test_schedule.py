"""Work lists: every query and every page seen, once each, and nothing else."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mask import MaskRule
from pallas_kernels.schedule import Batch, Schedule, make_schedule
from tests.pallas_kernels.cases import Shape, random_rows

SHAPE = Shape(num_tokens=50, num_rows=6, num_columns=40, page_size=4)
TILE_PAGES = (5, 3)


def _schedule(rows: list[tuple[int, int]], mask: MaskRule, queries: int, few: int = 1) -> Schedule:
    q_lens = np.array([q for q, _ in rows] + [0] * (SHAPE.num_rows - len(rows)), np.int32)
    seq_lens = np.array([n for _, n in rows] + [0] * (SHAPE.num_rows - len(rows)), np.int32)
    starts = np.concatenate([[0], np.cumsum(q_lens)[:-1]]).astype(np.int32)
    batch = Batch(*(jnp.asarray(x) for x in (seq_lens, starts, q_lens)))
    return make_schedule(
        batch,
        mask,
        num_tokens=SHAPE.num_tokens,
        queries=queries,
        few=few,
        tile_pages=TILE_PAGES,
        page_size=SHAPE.page_size,
    )


def _items(schedule: Schedule, part: int) -> list[tuple[int, ...]]:
    """(sequence, first token, first position, last position, pages, KV tile) of every work item of a part."""
    items = []
    for i in range(int(schedule.num_items(part))):
        tile, kv_tile = schedule.item(part, jnp.int32(i))
        items.append((*map(int, (tile.seq, tile.token, tile.first_pos, tile.last_pos, tile.num_pages)), int(kv_tile)))
    return items


@pytest.mark.parametrize("mask", [MaskRule(), MaskRule(sliding_window=6, num_sink_tokens=5), MaskRule(causal=False)])
@pytest.mark.parametrize("few", [1, 4])
@pytest.mark.parametrize("seed", range(5))
def test_every_query_sees_every_page_of_its_run_once(mask: MaskRule, seed: int, few: int) -> None:
    """The items of a query tile are its KV tiles, in order; the tiles of a sequence are its queries, in order."""
    rows = random_rows(np.random.default_rng(seed), SHAPE)
    schedule = _schedule(rows, mask, queries=7, few=few)
    for part, tile_pages in enumerate(TILE_PAGES):
        expected = []
        token = 0
        for seq, (q_len, seq_len) in enumerate(rows):
            for first in range(0, q_len, 7):
                first_pos = seq_len - q_len + first
                last_pos = seq_len - q_len + min(first + 7, q_len) - 1
                pages = int(mask.page_run(first_pos, last_pos, seq_len, SHAPE.page_size).num_pages)
                tiles = range(-(-pages // tile_pages)) if (q_len <= few) == (part == 0) else ()
                expected += [(seq, token + first, first_pos, last_pos, pages, tile) for tile in tiles]
            token += q_len
        assert _items(schedule, part) == expected


@pytest.mark.parametrize("few", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_query_tiles_have_the_items_that_are_listed(seed: int, few: int) -> None:
    """Tile by tile, or item by item: the same work in the same order; several items may be asked for at once."""
    schedule = _schedule(random_rows(np.random.default_rng(seed), SHAPE), MaskRule(), queries=7, few=few)
    for part in range(2):
        items = _items(schedule, part)
        by_tile = []
        for n in range(int(schedule.num_tiles(part))):
            tile, count = schedule.tile(part, jnp.int32(n))
            fields = tuple(map(int, (tile.seq, tile.token, tile.first_pos, tile.last_pos, tile.num_pages)))
            by_tile += [(*fields, i) for i in range(int(count))]
        assert by_tile == items
        tiles, kv_tiles = schedule.item(part, jnp.arange(len(items), dtype=jnp.int32))
        assert list(zip(tiles.token.tolist(), kv_tiles.tolist(), strict=True)) == [(x[1], x[5]) for x in items]


def test_items_beyond_the_last_are_of_no_sequence_and_see_no_page() -> None:
    schedule = _schedule([(1, 9), (20, 60)], MaskRule(), queries=8)
    for part in range(2):
        tiles, _ = schedule.item(part, schedule.num_items(part) + jnp.arange(3, dtype=jnp.int32))
        assert tiles.num_pages.tolist() == [0, 0, 0]
        assert min(tiles.seq.tolist()) >= SHAPE.num_rows


def test_work_follows_the_tokens_attended() -> None:
    """16 more columns in the table or one window less to see: only the latter changes the number of items."""
    rows = [(1, 150), (1, 30), (20, 60)]
    full = _schedule(rows, MaskRule(), queries=8)
    assert int(full.num_items(0)) == 8 + 2  # 38 and 8 pages, 5 at a time
    window = _schedule(rows, MaskRule(sliding_window=4), queries=8)
    assert int(window.num_items(0)) == 1 + 1
    assert int(window.num_items(1)) == 3 * 1  # 3 query tiles that see 3 pages each
    assert int(_schedule([], MaskRule(), queries=8).num_items(0)) == 0

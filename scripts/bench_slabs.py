"""One memory in slabs: hits beside free exchange of bytes and the best split, and what slabs cost the host.

    python scripts/bench_slabs.py                        10 to 100 GB, 2,000 turns of agents, then 500 of documents
    python scripts/bench_slabs.py --gb 40 --json FILE

Flow:    made-up load -> SlabMemory over two pools | LRU over bytes, with one budget or two -> table, `--json FILE`

A page is 16 tokens of Qwen3-Next's 12 layers of attention, 393,216 bytes; a checkpoint is the states of 36 layers in
three slabs of 34 pages. Requests come one at a time: half are turns of sessions, which begin with one system prompt and
leave a checkpoint where it ends, where the turn before ended, and where they end; then come questions on documents of
600 to 4,000 pages. A request hits its longest prefix that has all pages and a checkpoint, and leaves checkpoints from
where its cached pages end.

*Free exchange* evicts by LRU over bytes: no memory of fixed pages does better under LRU. *Best split* is the best of 19
fixed shares. Times are means of CPU time: us a page that is allocated, evictions included, and us a checkpoint, beside
the same calls on pools of their own that are as large as the load leaves them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvjax.core.pool.block_pool import BlockPool
from kvjax.core.slabs.slab_memory import SlabMemory
from kvjax.core.spec import SlabSpec

PAGE_BYTES, STATE_BYTES = 393_216, 36 * 1_097_728
PAGES_PER_SLAB, SLABS_PER_CHECKPOINT = 34, 3
SLAB_BYTES = PAGES_PER_SLAB * PAGE_BYTES


class Turn(NamedTuple):
    """One request: the contents of its pages, and lengths in pages at which it leaves checkpoints, ascending."""

    pages: list[bytes]
    lengths: list[int]


def make_load(rng: np.random.Generator, num_agents: int, num_documents: int) -> Iterator[Turn]:
    """Turns of agents, then questions on documents."""
    system = [b"system %d" % i for i in range(30)]
    sessions: list[list[int]] = []  # name, pages so far, turns left
    for turn in range(num_agents):
        if len(sessions) < 400 or rng.random() < 0.03:
            sessions.append([turn, len(system), int(rng.integers(4, 30))])
        session = sessions[int(len(sessions) * rng.power(2.0))]
        name, before, _ = session
        session[1] += int(rng.integers(4, 90))
        session[2] -= 1
        own = [b"%d %d" % (name, i) for i in range(len(system), session[1])]
        yield Turn(system + own, sorted({len(system), before, session[1]}))
        if not session[2]:
            sessions.remove(session)
    sizes = rng.integers(600, 4_000, 300).tolist()
    for turn in range(num_documents):
        document = min(int(rng.zipf(1.3)) - 1, len(sizes) - 1)
        question = [b"question %d %d" % (turn, i) for i in range(int(rng.integers(2, 12)))]
        pages = [b"document %d %d" % (document, i) for i in range(sizes[document])] + question
        yield Turn(pages, [sizes[document], len(pages)])


class Exchange:
    """LRU over bytes, with one budget for all, or one for pages and one for states."""

    def __init__(self, num_bytes: int, share_of_pages: float | None = None) -> None:
        split = [num_bytes] if share_of_pages is None else [int(num_bytes * share_of_pages)]
        self.left = split if share_of_pages is None else [*split, num_bytes - split[0]]
        self.kept: list[OrderedDict[tuple[int, bytes], int]] = [OrderedDict() for _ in self.left]

    def serve(self, turn: Turn) -> int:
        """Pages of the hit."""
        pages, states = self.kept[0], self.kept[-1]
        shared = next((i for i, page in enumerate(turn.pages) if (0, page) not in pages), len(turn.pages))
        has_state = [n for n in turn.lengths if n <= shared and (1, turn.pages[n - 1]) in states]
        hit = max(has_state, default=0)
        for n in turn.lengths:
            if n == hit or n >= shared or n == len(turn.pages):
                self._keep(-1, (1, turn.pages[n - 1]), STATE_BYTES)
        for page in reversed(turn.pages):
            self._keep(0, (0, page), PAGE_BYTES)
        return hit

    def _keep(self, side: int, key: tuple[int, bytes], size: int) -> None:
        kept = self.kept[side]
        if key in kept:
            kept.move_to_end(key)
            return
        kept[key] = size
        self.left[side] -= size
        while self.left[side] < 0:
            self.left[side] += kept.popitem(last=False)[1]


@dataclass
class Spent:
    """Time of allocations."""

    us: float = 0.0
    parts: int = 0

    @property
    def mean(self) -> float:
        """us a part."""
        return self.us / max(self.parts, 1)


class Pools:
    """A pool of pages and one of states, in slabs or each with its own blocks."""

    def __init__(self, num_blocks: tuple[int, int], in_slabs: bool) -> None:
        self.pages, self.states = (BlockPool(size, eviction_policy="learned") for size in num_blocks)
        for pool in (self.pages, self.states):
            pool.eviction_policy.note_checkpoints()  # LRU in both
        self.memory = None
        if in_slabs:
            self.memory = SlabMemory(SlabSpec(num_blocks[1], (PAGES_PER_SLAB, 1)), (self.pages, self.states))
        self.spent = {"page": Spent(), "checkpoint": Spent()}

    def serve(self, turn: Turn) -> int:
        """Pages of the hit."""
        run = self.pages.find_run(turn.pages, 0)  # type: ignore[arg-type]
        hit = next((n for n in reversed(turn.lengths) if n <= run.size and self._state(turn, n) is not None), 0)
        orphans = self.pages.find_each(turn.pages[run.size :], 0)  # type: ignore[arg-type]
        self.pages.evict_blocks(orphans[orphans > 0])
        self.pages.touch(run)
        held = [run[::-1]]
        states = [self._state(turn, hit)] if hit else []
        self.states.touch(np.concatenate(states) if states else [])
        if num_new := len(turn.pages) - run.size:
            held.insert(0, self._take(self.pages, num_new, self.spent["page"], num_new)[::-1])
            self.pages.register_many(held[0][::-1], turn.pages[run.size :], 0)  # type: ignore[arg-type]
        for n in turn.lengths:
            if (n >= run.size or n == len(turn.pages)) and self._state(turn, n) is None:
                states.append(self._take(self.states, SLABS_PER_CHECKPOINT, self.spent["checkpoint"], 1))
                self.states.register_many(states[-1], _names(turn, n), 0)  # type: ignore[arg-type]
        self.states.free_blocks(np.concatenate(states) if states else [])
        self.pages.free_blocks(np.concatenate(held))
        for pool in (self.pages, self.states):
            pool.eviction_policy.note_step_planned()
        return hit

    def _state(self, turn: Turn, length: int) -> np.ndarray | None:
        found = self.states.find_each(_names(turn, length), 0)  # type: ignore[arg-type]
        return found if (found > 0).all() else None

    def _take(self, pool: BlockPool, count: int, spent: Spent, parts: int) -> np.ndarray:
        start = time.thread_time()
        if self.memory is not None:
            needs = [count, 0] if pool is self.pages else [0, count]
            assert self.memory.fit(needs)
        ids = pool.get_new_blocks(count)
        spent.us += 1e6 * (time.thread_time() - start)
        spent.parts += parts
        return ids


def _names(turn: Turn, length: int) -> list[bytes]:
    """Of the parts of a checkpoint."""
    return [b"state %d of " % i + turn.pages[length - 1] for i in range(SLABS_PER_CHECKPOINT)]


@dataclass(frozen=True)
class Row:
    """Percent of pages hit, and us."""

    gb: float
    free_exchange: float
    slabs: float
    best_split: float
    us_a_page: float
    us_a_page_split: float
    us_a_checkpoint: float
    us_a_checkpoint_split: float


def measure(gb: float, load: list[Turn]) -> Row:
    """One size of memory."""
    num_bytes, num_pages = int(gb * 1e9), sum(len(turn.pages) for turn in load)

    def percent(cache: Exchange | Pools) -> float:
        return 100 * sum(map(cache.serve, load)) / num_pages

    num_slabs = num_bytes // SLAB_BYTES
    slabs = Pools((num_slabs * PAGES_PER_SLAB, num_slabs), in_slabs=True)
    of_slabs, memory = percent(slabs), slabs.memory
    assert memory is not None
    memory.check_invariants()
    num_states = max(int((memory.owner == 1).sum()), 2 * SLABS_PER_CHECKPOINT)
    split = Pools(((num_slabs - num_states) * PAGES_PER_SLAB, num_states + 1), in_slabs=False)
    percent(split)
    times = [pools.spent[part].mean for part in ("page", "checkpoint") for pools in (slabs, split)]
    best = max(percent(Exchange(num_bytes, share / 20)) for share in range(1, 20))
    return Row(gb, percent(Exchange(num_bytes)), of_slabs, best, *times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, nargs="+", default=[10, 20, 40, 60, 100], help="sizes of the memory")
    parser.add_argument("--agents", type=int, default=2_000, help="turns (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=500, help="questions (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    args = parser.parse_args()
    load = list(make_load(np.random.default_rng(0), args.agents, args.documents))
    print("   GB  exchange   slabs   of it   split   us a page (split)   us a checkpoint (split)")
    rows = []
    for gb in args.gb:
        rows.append(row := measure(gb, load))
        print(
            f"{row.gb:5.0f} {row.free_exchange:9.2f} {row.slabs:7.2f} {row.slabs / row.free_exchange:7.1%} "
            f"{row.best_split:7.2f}   {row.us_a_page:9.2f} ({row.us_a_page_split:.2f})   "
            f"{row.us_a_checkpoint:15.1f} ({row.us_a_checkpoint_split:.1f})",
            flush=True,
        )
    if args.json is not None:
        args.json.write_text(json.dumps([vars(row) for row in rows], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

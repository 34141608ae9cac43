"""The same requests through a stack's own prefix cache, from its sources, and through kvjax's with its surface.

    python scripts/stack_caches.py sglang_jax PATH              PATH: a checkout's `python` folder
    python scripts/stack_caches.py easydel PATH --seeds 20      PATH: an unpacked wheel
    python scripts/stack_caches.py sglang_jax PATH --trace FILE --num-requests 1500

Flow:    random moves -> the stack's cache, kvjax's -> [stack_caches] -> a line a case

EasyDeL: every call's answer is the same, page ids too, in one shard, and its cache update of version "v2" writes the
converted slices where kvjax's slots say; the exit status is 1 where one differs.

sglang-jax: laws, of both: a hit's slots hold its prefix, no slot is given twice, and at the end all are free. Where
nothing is evicted, both hit the same tokens; else kvjax may hit more, since the stack evicts whole leaves. "broken"
counts the seeds in which the stack's own cache breaks a law: SWARadixCache frees the pages of a tombstone that it
revives, though requests run on them. The exit status is 1 where hits differ without evictions; a law that kvjax breaks
raises.

With a trace (sglang-jax): percent of the prompts' tokens that the stack's own cache hits, and kvjax's under each
policy, where windows get as many tokens for each of full attention as `swa_full_tokens_ratio` says.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from scripts.stack_checks import easydel_manager, easydel_slices
from scripts.stack_checks.served_requests import ServedRequests, StateRows, play, random_moves
from scripts.stack_checks.sglang_caches import make_pair, make_state_pair
from scripts.stack_checks.trace_prompts import PAGE, pool_sizes, serve_prompts

WINDOW, NUM_MOVES = 12, 200
# pages, page_size, window_pages, ranks
AMPLE: dict[str, tuple[int, int, int, int | None]] = {
    "full, pages of 1": (4000, 1, 0, 1),
    "full, pages of 4": (2000, 4, 0, 1),
    "full, 2 ranks": (2000, 4, 0, 2),
    "windows, pages of 4": (2000, 4, 2000, 1),
    "windows, 2 ranks": (2000, 4, 2000, 2),
}
TIGHT: dict[str, tuple[int, int, int, int | None]] = {
    "full, pages of 1, tight": (200, 1, 0, 1),
    "full, pages of 4, tight": (60, 4, 0, 1),
    "windows, tight": (60, 4, 40, 1),
}

# pages, page_size, slots of states, tokens between boundaries
RECURRENT: dict[str, tuple[int, int, int, int | None]] = {
    "states, pages of 1": (4000, 1, 400, None),
    "states, pages of 4": (2000, 4, 400, 8),
    "states, pages of 1, tight": (150, 1, 8, None),
    "states, pages of 4, tight": (50, 4, 20, 8),
}


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; 1 where something differs that may not."""
    parser = argparse.ArgumentParser(description="Play requests through a stack's caches and kvjax's.")
    parser.add_argument("stack", choices=("easydel", "sglang_jax"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--trace", type=Path, help="JSON lines of input_length and hash_ids of 512 tokens (Mooncake)")
    parser.add_argument("--num-requests", type=int, help="of the trace; all if left out")
    options = parser.parse_args(arguments)
    if options.trace is not None:
        lines = options.trace.read_text().splitlines()[: options.num_requests]
        compare_on_trace(options.path, [json.loads(line) for line in lines])
        return 0
    compare = compare_easydel if options.stack == "easydel" else compare_sglang_jax
    return int(compare(options.path, options.seeds))


def compare_easydel(path: Path, num_seeds: int) -> bool:
    """Prints how many answers were equal; whether one differs."""
    differs = False
    print(f"{'case':10} {'answers':>8} {'equal':>8}")
    for kind in ("full", "hybrid"):
        count = equal = 0
        for seed in range(num_seeds):
            theirs, ours, status = easydel_manager.make_pair(path, kind)
            pairs = zip(
                easydel_manager.answers(theirs, status, seed, 1),
                easydel_manager.answers(ours, status, seed, 1),
                strict=True,
            )
            found = [a == b for a, b in pairs]
            count, equal = count + len(found), equal + sum(found)
        print(f"{kind:10} {count:8,} {equal:8,}")
        differs |= count != equal
    alike = easydel_slices.steps_written_alike(path, 0)
    print(f"{'slices':10} {len(alike):8,} {sum(alike):8,}")
    return differs or not all(alike)


def compare_sglang_jax(path: Path, num_seeds: int) -> bool:
    """Prints a line a case; whether hits differ where nothing is evicted."""
    differs = False
    print(f"{'case':26} {'requests':>8} {'hit, theirs':>12} {'kvjax':>9} {'s, theirs':>10} {'kvjax':>7} {'broken':>7}")
    for case, sizes in {**AMPLE, **TIGHT, **RECURRENT}.items():
        hits, seconds, requests, num_broken = np.zeros(2, np.int64), np.zeros(2), 0, 0
        for seed in range(num_seeds):
            pages, page_size, more, last = sizes
            if case in RECURRENT:
                pair = make_state_pair(path, pages=pages, page_size=page_size, num_states=more or 0, interval=last)
            else:
                pair = make_pair(
                    path, pages=pages, page_size=page_size, window_pages=more or 0, window=WINDOW, ranks=last or 1
                )
            for place, served in enumerate(pair):
                start = time.perf_counter()
                try:
                    if case in RECURRENT:
                        _play_states(served, seed, pages * page_size)
                    else:
                        _play_all(served, seed, pages * page_size, (more or 0) * page_size, last or 1)
                except AssertionError:
                    if place == 1:
                        raise
                    num_broken += 1
                seconds[place] += time.perf_counter() - start
                hits[place] += sum(served.hits)
            requests += len(pair[1].hits)
            differs |= case in AMPLE and pair[0].hits != pair[1].hits
        counts = f"{requests:8} {hits[0]:12,} {hits[1]:9,}"
        print(f"{case:26} {counts} {seconds[0]:10.2f} {seconds[1]:7.2f} {num_broken:7}")
    return differs


def compare_on_trace(path: Path, lines: list[dict[str, Any]]) -> None:
    """Prints a line a model, memory size and share of the windows."""
    print(f"{'model':14} {'GB':>4} {'ratio':>6} {'theirs':>8} {'stack':>8} {'kvjax':>8}")
    for model, gigabytes, share in itertools.product(("gemma-3-27b", "gpt-oss-120b"), (100, 400), (0.8, 0.1)):
        pages, window_pages, window = pool_sizes(model, gigabytes * 10**9, share)
        rates: list[str] = []
        for policy in ("stack", "kvjax"):
            pair = make_pair(
                path,
                pages=pages,
                page_size=PAGE,
                window_pages=window_pages,
                window=window,
                ranks=1,
                policy=policy,
            )
            for served in pair[len(rates) > 0 :]:  # the stack's own once
                hit, total = serve_prompts(served, lines)
                rates.append(f"{hit / total:8.2%}")
        print(f"{model:14} {gigabytes:4} {share:6} {' '.join(rates)}", flush=True)


def _play_states(served: ServedRequests, seed: int, size: int) -> None:
    rows = served.rows
    assert isinstance(rows, StateRows)
    num_states = len(rows.free_states)
    for move in random_moves(seed, NUM_MOVES, 1, turns=True):
        play(served, move)
    served.end_all()
    assert served.allocator.available_size() == size
    assert sorted(rows.free_states) == list(range(1, num_states + 1))


def _play_all(served: ServedRequests, seed: int, size: int, size_swa: int, ranks: int) -> None:
    for move in random_moves(seed, NUM_MOVES, ranks):
        play(served, move)
    served.end_all()
    served.cache.evict(served.classes["EvictParams"](num_tokens=0, swa_num_tokens=10**6, dp_rank=None))
    for rank in range(ranks):
        if served.window is None:
            assert served.allocator.available_size(rank) == size
        else:
            assert served.allocator.full_available_size(rank) == size
            assert served.allocator.swa_available_size(rank) == size_swa


if __name__ == "__main__":
    sys.exit(main())

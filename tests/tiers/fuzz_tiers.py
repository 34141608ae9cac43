"""Random faults in tiers: loads that fail midway or hang, damaged and lost stores, lost reports, aborts, lost units.

Flow:    tests.tiers.tiered_world -> [fuzz_tiers] -> a line per setup; exits 1 where a law is broken
Usage:   python -m tests.tiers.fuzz_tiers --faults 10000

After each step every page that a request attends is compared with what it should hold, and the laws of manager, host
and loads are checked; at the end no block and no slot is held. Half of the worlds have two data ranks over one host and
one disk, half have blocks on probation; the host is tiny, short or ample.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.tiers.scheduler.test_tier_scheduler import POLICIES, SETUPS
from tests.tiers.tiered_world import TieredWorld

STEPS = 100  # of one world


def main() -> int:
    """Runs worlds of all setups in turns until enough faults were planted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=10_000, metavar="N", help="default: 10,000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    start, totals, counts = time.perf_counter(), Counter[str](), Counter[str]()
    seed = args.seed
    while sum(totals.values()) < args.faults:
        for name, groups in SETUPS.items():
            write_through, num_ranks = seed % 2 == 1, 1 + seed // 2 % 2
            policy = list(POLICIES)[seed // 4 % len(POLICIES)]
            rules = {"write_through": write_through, "host_bytes": (5, 160, 1_200)[seed % 3], **POLICIES[policy]}
            options: dict[str, Any] = {"fault_rate": 0.15, **rules}
            world = TieredWorld(groups, seed, **options)
            for _ in range(1, num_ranks):
                TieredWorld(groups, seed, first=world, **options)
            try:
                for _ in range(STEPS):
                    world.step()
                    world.check_invariants()
                world.drain()
            except AssertionError as error:
                print(f"seed {seed}, {name}, {rules}, {num_ranks} ranks: {error}")
                return 1
            totals.update(world.faults)
            counts.update(worlds=1)
            for one in world.worker.worlds:
                made = {"requests": one.num_made, "loaded": one.num_loaded, "failed": one.num_failed}
                counts.update(made, foreign_pages=one.num_foreign)
        seed += 1
    seconds = time.perf_counter() - start
    planted = ", ".join(f"{fault} {count:,}" for fault, count in sorted(totals.items()))
    print(
        f"{sum(totals.values()):,} faults ({planted}) in {seconds:.0f} s; {dict(counts)}: no law broken, nothing held"
    )
    if args.json is not None:
        args.json.write_text(json.dumps({"faults": dict(totals), **counts, "seconds": seconds}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

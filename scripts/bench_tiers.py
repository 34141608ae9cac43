"""Throughput of the host tier, down and up, beside a plain copy of the same bytes; and of the disk tier.

    python scripts/bench_tiers.py                    128 MiB in units of 512 KiB, 21 turns
    python scripts/bench_tiers.py --json FILE --unit-kib 2048 --mib 512

Flow:    pages of one pool, Tiers -> [bench_tiers] -> table on the terminal, `--json FILE`

Down: pages are gathered and written into slots of host memory, as evictions do. Up: units go from slots to the device
and into pages, as loads do. The plain copies move the same pages by jax alone, in pieces of as many pages: down, the
gathered pages of each piece are read into one numpy array of the host; up, pieces of such an array go to the device and
are scattered into pages. `memcpy` is numpy's copy of one array into another. Pages, arrays and slots are all touched
before; what a copy allocates on its way is its own.

Turns are short (`--turn-mib`), plain copy and tier follow each other at once in an order drawn anew, and a ratio is of
the two times of one turn: a machine that others use slows both. Medians and quartiles; and ratios of processor time,
all threads together, which waiting for others does not change.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from kvjax.core import BlockHash, BlockHasher
from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.spec import KVCacheConfig, KVCacheGroupSpec, KVCachePoolSpec
from kvjax.device import KVPages, create_pages
from kvjax.device.pages.page_ops import gather_pages, scatter_pages
from kvjax.tiers.config import TierConfig
from kvjax.tiers.tiers import Tiers
from kvjax.tiers.units import LoadUnits, StoreUnits, TierMeta, UnitKey
from kvjax.tiers.worker.tier_worker import PIECE_BYTES

LAYERS = 8


class Bench:
    """One pool of pages, and tiers that hold all of it."""

    def __init__(self, unit_bytes: int, num_units: int, folder: str, in_flight_bytes: int | None) -> None:
        spec = FullAttentionSpec(
            block_size=16, num_kv_heads=unit_bytes // (LAYERS * 2 * 16 * 64 * 4), head_size=64, dtype="float32"
        )
        names = tuple(f"layers.{i}" for i in range(LAYERS))
        columns = tuple(spec.page_layout("cpu") for _ in names)
        config = KVCacheConfig((KVCachePoolSpec(num_units + 1, columns),), (KVCacheGroupSpec(names, spec),))
        self.piece = 8 if 64 * unit_bytes > PIECE_BYTES else 64
        self.num_units, self.num_bytes = num_units, num_units * config.pools[0].bytes_per_block
        host = TierConfig(
            host_bytes=self.num_bytes + 2 * config.pools[0].bytes_per_block,
            disk_folder=folder,
            disk_bytes=4 * self.num_bytes,
            weights="bench",
            max_bytes_in_flight=in_flight_bytes,
        )
        self.tiers = Tiers.of_process(host, config, BlockHasher(16))
        self.tiers.worker.close()
        memory_only = TierConfig(host_bytes=host.host_bytes, max_bytes_in_flight=in_flight_bytes)
        self.worker = Tiers.of_process(memory_only, config, BlockHasher(16)).worker
        self.pages: KVPages = jax.tree.map(lambda array: array + 1.0, create_pages(config))
        self.hashes = tuple(BlockHash(i.to_bytes(32, "big")) for i in range(num_units))
        rng = np.random.default_rng(0)
        self.ids = (rng.permutation(num_units) + 1).astype(np.int32)
        self.plain = [np.zeros((num_units, *array.shape[1:]), array.dtype) for array in jax.tree.leaves(self.pages)]
        self.pages = self.worker.warmup(self.pages)
        self.other = [np.zeros_like(array) for array in self.plain]

    def memcpy(self, first: int, end: int) -> None:
        """Numpy's copy of the same bytes."""
        for source, target in zip(self.plain, self.other, strict=True):
            np.copyto(target[first:end], source[first:end])

    def plain_down(self, first: int, end: int) -> None:
        """Gathered pages of each piece into arrays of the host."""
        for start in range(first, end, self.piece):
            ids = self.ids[start : start + self.piece]
            for target, array in zip(self.plain, jax.tree.leaves(gather_pages(self.pages, 0, ids)), strict=True):
                target[start : start + ids.size] = np.asarray(array)[: ids.size]

    def plain_up(self, first: int, end: int) -> None:
        """Pieces of the host's arrays into pages."""
        tree = jax.tree.structure(self.pages.pools[0])
        for start in range(first, end, self.piece):
            ids = self.ids[start : start + self.piece]
            arrays = [jax.device_put(array[start : start + self.piece]) for array in self.plain]
            self.pages = scatter_pages(self.pages, 0, ids, jax.tree.unflatten(tree, arrays))
        jax.block_until_ready(self.pages)

    def down(self, first: int, end: int) -> None:
        """Pages into slots of the host tier."""
        store = StoreUnits(0, self.hashes[first:end], self.ids[first:end])
        self.pages = self.worker.start_load_kv(self.pages, TierMeta(stores=(store,)))
        slots = [stored.slots for stored in self.worker.flush()]
        self.worker._host.let_go(0, np.concatenate(slots))

    def up(self, first: int, end: int) -> None:
        """Units from slots into pages."""
        host, slots = self.worker._host, np.arange(first + 1, end + 1, dtype=np.int32)
        host.hold(0, slots)
        load = LoadUnits(0, 0, self.hashes[first:end], slots, self.ids[first:end])
        self.pages = self.worker.start_load_kv(self.pages, TierMeta(loads=(load,)))
        while self.worker._staged:
            self.worker.wait()
            self.pages = self.worker.start_load_kv(self.pages, TierMeta())
            self.worker.get_finished()
        jax.block_until_ready(self.pages)
        host.let_go(0, slots)

    def to_disk(self) -> None:
        """All units into files."""
        disk, unit = self.tiers.disk, np.concatenate([array[0].reshape(-1).view(np.uint8) for array in self.plain])
        assert disk is not None
        for block_hash in self.hashes:
            disk.delete(UnitKey(0, block_hash))
        start = time.perf_counter()
        for block_hash in self.hashes:
            disk.put(UnitKey(0, block_hash), unit)
        self.disk_s = time.perf_counter() - start

    def from_disk(self) -> None:
        """All units out of files, checked."""
        disk, unit = self.tiers.disk, np.empty(self.num_bytes // self.num_units, np.uint8)
        assert disk is not None
        for block_hash in self.hashes:
            disk.get(UnitKey(0, block_hash), unit)


def seconds_of(run: Callable[[], None]) -> tuple[float, float]:  # (wall, processor)
    """Seconds of one run."""
    start, start_cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start, time.process_time() - start_cpu


def main() -> None:
    """Runs everything in turns and prints medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--unit-kib", type=int, default=512, metavar="N", help="multiple of 64 (default: 512)")
    parser.add_argument("--mib", type=int, default=128, metavar="N", help="of pages and slots (default: 128)")
    parser.add_argument("--turn-mib", type=int, default=32, metavar="N", help="moved in one turn (default: 32)")
    parser.add_argument("--in-flight-mib", type=int, metavar="N", help="of the host tier (default: its own)")
    parser.add_argument("--turns", type=int, default=21, metavar="N", help="over all pages (default: 21)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        in_flight_bytes = None if args.in_flight_mib is None else args.in_flight_mib << 20
        bench = Bench(args.unit_kib << 10, (args.mib << 10) // args.unit_kib, folder, in_flight_bytes)
        step = max((args.turn_mib << 10) // args.unit_kib, 1)
        times = times_in_turns(bench, step, args.turns)
        disk_times: dict[str, list[float]] = {"to_disk": [], "from_disk": []}
        for _ in range(3):
            bench.to_disk()
            disk_times["to_disk"].append(bench.disk_s)
            disk_times["from_disk"].append(seconds_of(bench.from_disk)[0])
        turn_bytes = bench.num_bytes * step // bench.num_units
        rates = {name: turn_bytes / median(wall for wall, _ in of) / 1e9 for name, of in times.items()}
        rates |= {name: bench.num_bytes / median(of) / 1e9 for name, of in disk_times.items()}
        ratios = {
            f"{way}, {what}": ratios_of([of[i] for of in times[f"plain_{way}"]], [of[i] for of in times[way]])
            for way in ("down", "up")
            for i, what in enumerate(("time", "processor time"))
        }
        for name, rate in rates.items():
            print(f"{name:>12} {rate:6.2f} GB/s")
        for way, (low, middle, high) in ratios.items():
            print(f"host tier / plain copy, {way}: median {middle:.2f}, quartiles {low:.2f} to {high:.2f}")
        if args.json is not None:
            values = {"device": jax.devices()[0].device_kind, "unit_kib": args.unit_kib, "mib": args.mib}
            args.json.write_text(json.dumps(values | {"gb_per_s": rates, "ratios": ratios}) + "\n")


def times_in_turns(bench: Bench, step: int, num_turns: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds, as `seconds_of`, of every way, turn by turn; a turn moves `step` units, one way beside the other."""
    pairs = [["plain_down", "down"], ["plain_up", "up"]]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ("memcpy", *pairs[0], *pairs[1])}
    drawn = random.Random(0)
    for turn in range(num_turns + 1):
        for first in range(0, bench.num_units, step):
            end = min(first + step, bench.num_units)
            for names in (["memcpy"], *(drawn.sample(pair, 2) for pair in pairs)):
                for name in names:
                    seconds = seconds_of(partial(getattr(bench, name), first, end))
                    if turn and end - first == step:  # the first touches memory
                        times[name].append(seconds)
    return times


def ratios_of(plain: Sequence[float], own: Sequence[float]) -> tuple[float, float, float]:
    """Quartiles of what the tier makes of each turn of the plain copy."""
    low, middle, high = quantiles([one / other for one, other in zip(plain, own, strict=True)], n=4)
    return low, middle, high


if __name__ == "__main__":
    main()

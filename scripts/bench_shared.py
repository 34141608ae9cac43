"""The shared tier beside its clients, and steps of an engine beside a store that is dead.

    python scripts/bench_shared.py                            a folder, memory, and redis-server where there is one
    python scripts/bench_shared.py --json FILE --unit-kib 2048 --mib 256
    python scripts/bench_shared.py --steps                    milliseconds of steps, host alone and before dead stores

Flow:    SharedStore and clients, or engines -> [bench_shared] -> table on the terminal, `--json FILE`

Throughput: the same units are written and read by `SharedStore` and by the client alone, in turns. The client has what
the tier has: for Redis pipelines of as many commands, for object stores as many requests at a time. The tier adds
names, checksums or encryption, deadlines, and the question whether a unit is there. Every write is of new names. The
tier's reads come from its own two threads, as an engine's do. Ratios are of the two times of one turn, and of processor
time, all threads together, which waiting for others does not change.

Steps: engines with the same host tier serve the same new prompts in turns, two alone, the others before a store that
refuses connections, that takes them and never answers, and that works. Ratios by
the clock are of the steps of one turn, that of processor time is of all turns together.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from kvjax.core import BlockHash
from kvjax.tiers.shared.config import SharedTierConfig
from kvjax.tiers.shared.object_backend import MAX_REQUESTS
from kvjax.tiers.shared.redis_backend import PIPELINE_UNITS
from kvjax.tiers.shared.shared_store import SharedStore
from kvjax.tiers.units import UnitKey

PASSWORD = "bench"
UNHURRIED: dict[str, Any] = {"timeout_s": 60.0, "lookup_timeout_s": 60.0}


@contextmanager
def redis_server(folder: str) -> Iterator[str]:
    """A server with a password; its address."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    assert program is not None
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    options = ["--port", str(port), "--requirepass", PASSWORD, "--save", "", "--dir", folder]
    server = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
    for _ in range(1_000):
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.01)
    try:
        yield f"redis://:{PASSWORD}@127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


class RedisClient:
    """The client `redis` by itself, in pipelines."""

    def __init__(self, url: str) -> None:
        import redis

        self.client = redis.Redis.from_url(url)

    def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        for first in range(0, len(items), PIPELINE_UNITS):
            pipeline = self.client.pipeline(transaction=False)
            for name, data in items[first : first + PIPELINE_UNITS]:
                pipeline.set(name, data)
            pipeline.execute()

    def get(self, names: Sequence[str]) -> None:
        for first in range(0, len(names), PIPELINE_UNITS):
            pipeline = self.client.pipeline(transaction=False)
            for name in names[first : first + PIPELINE_UNITS]:
                pipeline.get(name)
            pipeline.execute()

    def clear(self) -> None:
        self.client.flushall()


class ObjectClient:
    """The client `obstore` by itself, so many requests at a time."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        import obstore

        asyncio.run(self._all([lambda item=item: obstore.put_async(self.store, *item) for item in items]))

    def get(self, names: Sequence[str]) -> None:
        asyncio.run(self._all([lambda name=name: self._get(name) for name in names]))

    def clear(self) -> None:
        import obstore

        for found in obstore.list(self.store):
            obstore.delete(self.store, [one["path"] for one in found])

    async def _get(self, name: str) -> Any:
        import obstore

        return await (await obstore.get_async(self.store, name)).bytes_async()

    async def _all(self, calls: Sequence[Callable[[], Any]]) -> None:
        slots = asyncio.Semaphore(MAX_REQUESTS)

        async def one(call: Callable[[], Any]) -> None:
            async with slots:
                await call()

        await asyncio.gather(*map(one, calls))


class Throughput:
    """One store: the tier and the client write and read the same bytes."""

    def __init__(self, store: Any, client: Any, unit_bytes: int, num_units: int, secret: str | None) -> None:
        config = SharedTierConfig(store=store, secret=secret, max_bytes_in_flight=1 << 40, **UNHURRIED)
        self.tier = SharedStore(config, {"layout": "bench"})
        self.client = client
        self.num_bytes = unit_bytes * num_units
        self.pages = [np.random.default_rng(0).integers(0, 256, (num_units, unit_bytes), dtype=np.uint8)]
        self.data = [row.tobytes() for row in self.pages[0]]
        self.numbers = itertools.count()

    def turn(self) -> dict[str, tuple[float, float]]:
        """Wall and processor seconds of each way; what was written is deleted behind it."""
        number, count = next(self.numbers), len(self.data)
        keys = [UnitKey(number, BlockHash(i.to_bytes(32, "big"))) for i in range(count)]
        names = [f"plain/{number}/{i}" for i in range(count)]
        at_once = max((1 << 23) // self.pages[0].shape[1], 1)
        times: dict[str, tuple[float, float]] = {}

        def tier_write() -> None:
            for first in range(0, count, at_once):
                self.tier.offer(keys[first : first + at_once], [self.pages[0][first : first + at_once]])
            self.tier.flush()

        def read_part(first: int) -> None:
            self.tier.read(keys[first : first + at_once], self.pages[0].shape[1])

        def tier_read() -> None:
            list(self.tier.readers.map(read_part, range(0, count, at_once)))

        pairs = [
            [
                ("write, client", lambda: self.client.put(list(zip(names, self.data, strict=True)))),
                ("write", tier_write),
            ],
            [("read, client", lambda: self.client.get(names)), ("read", tier_read)],
        ]
        for pair in pairs:
            for name, run in random.sample(pair, 2):
                start, start_cpu = time.perf_counter(), time.process_time()
                run()
                times[name] = time.perf_counter() - start, time.process_time() - start_cpu
        self.client.clear()
        return times


def bench_throughput(args: argparse.Namespace) -> dict[str, Any]:
    """GB/s of each store, and the tier's share of the client's."""
    import obstore.store

    results: dict[str, Any] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        memory, local = obstore.store.MemoryStore(), obstore.store.LocalStore(folder, mkdir=True)
        stores: list[tuple[str, Any, Any]] = [("memory", memory, ObjectClient(memory))]
        stores.append(("folder", local, ObjectClient(local)))
        if shutil.which("valkey-server") or shutil.which("redis-server"):
            url = stack.enter_context(redis_server(stack.enter_context(tempfile.TemporaryDirectory())))
            stores.append(("redis", url, RedisClient(url)))
        for name, store, client in stores:
            for secret in (None, "a secret of the bench"):
                bench = Throughput(store, client, args.unit_kib << 10, (args.mib << 10) // args.unit_kib, secret)
                turns = [bench.turn() for _ in range(args.turns + 1)][1:]
                bench.tier.close()
                results[f"{name}, encrypted" if secret else name] = told(turns, bench.num_bytes)
    return results


def told(turns: Sequence[dict[str, tuple[float, float]]], num_bytes: int) -> dict[str, Any]:
    """Medians, and quartiles of the ratios turn by turn, of wall and of processor seconds."""
    rates = {name: num_bytes / median(turn[name][0] for turn in turns) / 1e9 for name in turns[0]}
    ratios = {}
    for way in ("write", "read"):
        pairs = [(turn[f"{way}, client"], turn[way]) for turn in turns]
        ratios[way] = [quantiles([client[clock] / own[clock] for client, own in pairs], n=4) for clock in (0, 1)]
    return {"gb_per_s": rates, "ratios": ratios}


def bench_steps(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds a step of each engine, and what stores cost beside the host alone."""
    from kvjax.demo import demo_model_path
    from kvjax.engine import EngineConfig, LLMEngine, SamplingParams
    from kvjax.models import load_model
    from kvjax.tiers import TierConfig

    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=128))  # accepts, never answers
        addresses: dict[str, str | None] = {
            "host alone": None,
            "again": None,  # what chance makes of two that are alike
            "refuses": "redis://127.0.0.1:1",
            "never answers": f"redis://127.0.0.1:{silent.getsockname()[1]}",
        }
        if shutil.which("valkey-server") or shutil.which("redis-server"):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            addresses["works"] = stack.enter_context(redis_server(folder))
        model, like, engines = load_model(demo_model_path(), "float32"), None, {}
        for name, url in addresses.items():
            shared = None if url is None else SharedTierConfig(store=url)
            tiers = TierConfig(host_bytes=1 << 26, write_through=True, weights="bench", shared=shared)
            config = EngineConfig(
                num_blocks=400, max_model_len=192, max_num_seqs=8, max_num_batched_tokens=64, max_buckets=1, tiers=tiers
            )
            engines[name] = like = LLMEngine(model, config, like=like)
        rng = np.random.default_rng(0)
        params = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
        for turn in range(args.turns + 1):
            prompts = rng.integers(3, 250, (8, 100)).tolist()
            for name in random.sample(list(engines), len(engines)):
                num_steps = len(engines[name].step_stats)
                start, start_cpu = time.perf_counter(), time.process_time()
                engines[name].generate(prompts, params)
                seconds = time.perf_counter() - start, time.process_time() - start_cpu
                engines[name].connector.flush()  # beside nobody else's steps
                if turn:  # the first compiles
                    num_steps = len(engines[name].step_stats) - num_steps
                    times[name].append((seconds[0] / num_steps * 1e3, seconds[1] / num_steps * 1e3))
        ratios, processor = {}, {}
        for name, of in times.items():
            pairs = list(zip(of, times["host alone"], strict=True))
            ratios[name] = quantiles([one[0] / alone[0] for one, alone in pairs], n=4)
            processor[name] = sum(one[1] for one, _ in pairs) / sum(alone[1] for _, alone in pairs)
        failures = {name: engine.connector.stats.num_shared_failures for name, engine in engines.items()}
        for engine in engines.values():
            engine.connector.close()
    return {
        "ms_per_step": {name: median(wall for wall, _ in of) for name, of in times.items()},
        "ratios": ratios,
        "processor": processor,
        "failures": failures,
    }


def main() -> None:
    """Runs one of both and prints medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", action="store_true", help="steps beside dead stores, instead of throughput")
    parser.add_argument("--unit-kib", type=int, default=512, metavar="N", help="of a unit (default: 512)")
    parser.add_argument("--mib", type=int, default=64, metavar="N", help="written and read in a turn (default: 64)")
    parser.add_argument("--turns", type=int, default=11, metavar="N", help="(default: 11)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    results = bench_steps(args) if args.steps else bench_throughput(args)
    if args.steps:
        for name, milliseconds in results["ms_per_step"].items():
            low, middle, high = results["ratios"][name]
            print(
                f"{name:>14} {milliseconds:7.2f} ms a step, {middle:.3f} of host alone ({low:.3f} to {high:.3f}), "
                f"by processor time {results['processor'][name]:.3f}"
            )
    else:
        for store, of in results.items():
            for way in ("write", "read"):
                (low, middle, high), (_, processor, _) = of["ratios"][way]
                own, client = of["gb_per_s"][way], of["gb_per_s"][f"{way}, client"]
                print(
                    f"{store:>18}, {way:<5} {own:6.2f} GB/s, client {client:6.2f}, tier / client: median {middle:.2f} "
                    f"({low:.2f} to {high:.2f}), by processor time {processor:.2f}"
                )
    if args.json is not None:
        args.json.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()

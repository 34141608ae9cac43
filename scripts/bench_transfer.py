"""Throughput of a transfer between two processes, beside jax's own transfer server with the same arrays.

    python scripts/bench_transfer.py                 128 MiB of one request, 7 turns
    python scripts/bench_transfer.py --json FILE --layers 32

Flow:    pages, PageReader -> a server in a process of its own -> [bench_transfer] -> table, `--json FILE`

Both clients pull arrays that lie on the server's devices to their own, and wait until they are there. Each turn does
both, in an order drawn anew, so that a machine that others use slows both. jax's server knows no key and no encryption
and is not used by kvjax; it stands for the plain cost of such a copy.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from kvjax.core import KVCacheConfig, Request
from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.device import Placement, create_pages
from kvjax.planning import plan_kv_cache
from kvjax.transfer import PageClient, PageReader, PageServer, PageWriter, RequestPages, SentRequest, TransferKey

NUM_TOKENS, BLOCK_SIZE = 2048, 16
TIMEOUT_S = 120.0


def config_of(num_layers: int) -> KVCacheConfig:
    """Layers of 8 KV heads of 128 in bfloat16: 8 MiB each of a request."""
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype="bfloat16")
    layers = {f"layers.{i}": spec for i in range(num_layers)}
    return plan_kv_cache(
        layers, max_model_len=NUM_TOKENS, num_blocks=NUM_TOKENS // BLOCK_SIZE + 1, platform="cpu"
    ).config


def sent_of(config: KVCacheConfig) -> SentRequest:
    """A request that fills all pages."""
    table = np.arange(1, NUM_TOKENS // BLOCK_SIZE + 1, dtype=np.int32)
    return PageReader(config, Placement.create()).read(create_pages(config), RequestPages((table,), 0, NUM_TOKENS))


def serve(num_layers: int, num_turns: int) -> None:
    """The server's process: prints an offer of either kind for each turn, and waits for the end of its input."""
    sent, request = sent_of(config_of(num_layers)), Request("a", np.arange(NUM_TOKENS))
    server = PageServer(TransferKey.from_environment())
    plain = transfer.start_transfer_server(jax.devices()[0].client, "127.0.0.1:0", ["127.0.0.1:0"])
    arrays = [array for arrays in sent.arrays for array in arrays]
    print(plain.address(), flush=True)
    for turn in range(num_turns):
        plain.await_pull(turn, arrays)
        print(server.offer(sent, request).hex(), flush=True)
    sys.stdin.read()
    server.close()


def measure(num_layers: int, num_turns: int) -> dict[str, Any]:
    """Medians of GB/s of both, and of their ratio."""
    secret, config = os.urandom(32), config_of(num_layers)
    key = TransferKey(secret)
    command = [sys.executable, __file__, "--serve", "--layers", str(num_layers), "--turns", str(num_turns + 1)]
    environment = os.environ | {"KVJAX_TRANSFER_KEY": secret.hex()}
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        tickets = [bytes.fromhex(server.stdout.readline()) for _ in range(num_turns + 1)]
        client, writer = PageClient(key), PageWriter(config, Placement.create())
        device = jax.devices()[0]
        plain = transfer.start_transfer_server(device.client, "127.0.0.1:0", ["127.0.0.1:0"]).connect(address)
        header = client.read(tickets[0]).header
        shapes = [
            jax.ShapeDtypeStruct((layer.num_entries, *shape), dtype, sharding=SingleDeviceSharding(device))
            for layer in header.layers
            for shape, dtype in zip(layer.shapes, layer.dtypes, strict=True)
        ]
        num_bytes = sum(shape.size * shape.dtype.itemsize for shape in shapes)

        def ours(turn: int) -> Any:
            return client.pull(client.read(tickets[turn]), writer).wait(TIMEOUT_S).arrays

        def theirs(turn: int) -> Any:
            return plain.pull(turn, shapes)

        times: dict[str, list[float]] = {"kvjax": [], "jax": []}
        for turn in range(num_turns + 1):
            for name, pull in random.sample([("kvjax", ours), ("jax", theirs)], 2):
                begin = time.perf_counter()
                jax.block_until_ready(pull(turn))
                times[name].append(time.perf_counter() - begin)
        server.kill()
    rates = {name: num_bytes / 1e9 / median(found[1:]) for name, found in times.items()}  # the first one connects
    ratio = median(b / a for a, b in zip(times["kvjax"][1:], times["jax"][1:], strict=True))
    return {
        "mib": num_bytes / 2**20,
        "turns": num_turns,
        "gb_per_s": rates,
        "kvjax_over_jax": ratio,
        "jax": jax.__version__,
    }


def main() -> None:
    """As the module says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16, help="of 8 MiB each")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.layers, args.turns)
        return
    found = measure(args.layers, args.turns)
    rates = found["gb_per_s"]
    print(f"{found['mib']:.0f} MiB, {found['turns']} turns, jax {found['jax']}")
    print(f"kvjax, encrypted {rates['kvjax']:6.2f} GB/s")
    print(f"jax, plain       {rates['jax']:6.2f} GB/s; kvjax has {found['kvjax_over_jax']:.2f} of it")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

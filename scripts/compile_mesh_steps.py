"""Compiles a step of the engine for a mesh of context x tensor that is not here: what do its devices send each other?

    python scripts/compile_mesh_steps.py                    v6e 2x2 and v7x 2x2
    python scripts/compile_mesh_steps.py --chip h100        four cards of one host, with jax's CUDA plugin

Two layers of Llama 3 8B, or of another `--model`, one of each kind that it has: tokens of pages over two context ranks,
heads over the other axis. Each step compiles in a process of its own (`scripts/lab/engine_step.py`). Needs libtpu
(kvjax[tpu-aot]). Exit status: 0, or 1 where a step does not compile, pages are copied or not aliased, or arrays are
sent other than `scripts/lab/collectives.py` says.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.lab.collectives import Sent, bytes_over, expected_of, layers_of
from scripts.lab.tpu.chips import ENVIRONMENT
from scripts.lab.tpu.compiler import ROOT

MODELS = ("llama-3-8b", "gemma-3-27b", "deepseek-v3", "qwen3-next-80b-a3b")
NUM_CONTEXT = 2
TENSOR = {"v6e": 2, "v7x": 4, "h100": 2, "h200": 2}  # a chip of v7x is two devices
_CARDS = ("h100", "h200")
_GPU_FLAGS = {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}  # which wants a card


def compile_step(chip: str, options: argparse.Namespace) -> dict[str, Any]:
    """The report of the step, or what went wrong."""
    command = [
        sys.executable,
        "-m",
        "scripts.lab.engine_step",
        chip,
        options.model,
        *(["--each-kind"] if options.layers is None else ["--layers", str(options.layers)]),
    ]
    command += ["--tokens", str(options.tokens), "--shards", str(TENSOR[chip]), "--context", str(NUM_CONTEXT)]
    environment = os.environ | ENVIRONMENT | (_GPU_FLAGS if chip in _CARDS else {})
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=options.timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no end within {options.timeout:.0f} s"}
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]) if lines else {"error": " ".join(done.stderr.strip().splitlines()[-1:])}


def table(sent: Counter[Sent], expected: Counter[Sent]) -> list[str]:
    """A line for each array that is sent or should be, and one for each axis."""
    lines = []
    for each in sorted(sent | expected):
        verdict = "" if sent[each] == expected[each] else f"   expected {expected[each]}"
        name = f"{each.opcode:18} {each.axis:10} {each.array:18}"
        lines.append(f"  {sent[each]:3} x {name} {each.num_bytes:10,} bytes{verdict}")
    for axis in sorted({each.axis.split()[0] for each in sent | expected}):
        lines.append(
            f"  {axis}: {bytes_over(sent, axis):,} bytes a step, by the formula {bytes_over(expected, axis):,}"
        )
    return lines


def main(arguments: list[str]) -> int:
    """Exit status: 0, or 1 where a step is not in place or sends what it need not."""
    from scripts.lab import engine_step

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", action="append", choices=sorted(TENSOR), help="repeatable; default: v6e and v7x")
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--layers", type=int, help="the model's first (default: two, one of each kind it has)")
    parser.add_argument("--tokens", type=int, default=256, help="of the step; 8: each of eight sequences decodes")
    parser.add_argument("--timeout", type=float, default=900, metavar="SECONDS", help="of one step")
    options = parser.parse_args(arguments)
    config = engine_step.config_of(options.model, options.layers)
    layers = layers_of(config, config.get("text_config", config)["num_hidden_layers"])
    status = 0
    releases = f"libtpu {_release('libtpu')}, jax {version('jax')}"
    print(f"{releases}, {options.model}, {options.tokens} tokens, {len(layers)} layers: {'; '.join(map(str, layers))}")
    for chip in options.chip or ["v6e", "v7x"]:
        report = compile_step(chip, options)
        mesh = f"{chip}, context {NUM_CONTEXT} x tensor {TENSOR[chip]}"
        if "error" in report:
            print(f"{mesh}: failed: {report['error']}", flush=True)
            status = 1
            continue
        sent = Counter({Sent(*each): count for *each, count in report["collectives"]})
        expected = expected_of(
            config,
            num_layers=len(layers),
            num_tokens=options.tokens,
            num_context=NUM_CONTEXT,
            num_shards=TENSOR[chip],
            compiler="gpu" if chip in _CARDS else "tpu",
        )
        print(
            f"{mesh}: {report['aliased_arrays']} of {report['page_arrays']} page arrays aliased, "
            f"{report['page_copies']} copied, {report['temp_bytes'] / 2**20:.1f} MiB of temporaries"
        )
        print("\n".join(table(sent, expected)), flush=True)
        status |= sent != expected or not engine_step.is_in_place(report)
    return int(status)


def _release(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

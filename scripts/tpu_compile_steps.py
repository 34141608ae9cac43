"""Compiles a step of every family of models for TPUs, on a machine without one: are the pages in place?

    python scripts/tpu_compile_steps.py                     every family, some minutes each
    python scripts/tpu_compile_steps.py --model mixtral-8x7b --json steps.json
    python scripts/tpu_compile_steps.py --one-memory        families with recurrent layers, all pools in slabs
    python scripts/tpu_compile_steps.py --chip v7x --shards 1    not v6e 2x2, but one chip of another kind

The model is of real sizes with its first layers only, one of each kind at least, tensor parallel over `--shards`. Each
step compiles in a process of its own (`scripts/lab/engine_step.py`). Needs libtpu (kvjax[tpu-aot]). Exit status:
0, or 1 where a step does not compile, or pages are copied or not aliased.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.lab.tpu.chips import CHIPS, ENVIRONMENT
from scripts.lab.tpu.compiler import ROOT

# A shipped config of each family that runs, and the first layers that have every kind of layer among them.
STEPS = {
    "llama-3-8b": 2,
    "mistral-7b": 2,
    "qwen2.5-7b": 2,
    "qwen3-8b": 2,
    "phi-3-mini-4k": 2,
    "gemma-2-9b": 2,
    "gemma-3-27b": 6,
    "gemma-3n-e4b": 20,
    "gpt-oss-120b": 2,
    "llama-4-scout": 4,
    "mixtral-8x7b": 2,
    "qwen3-235b-a22b": 2,
    "qwen3-vl-235b-a22b": 2,
    "whisper-large-v3": 2,
    "deepseek-v3": 4,
    "deepseek-v3.2": 4,
    "glm-5.2": 4,
    "deepseek-v4-flash": 4,
    "jamba-1.5-mini": 5,
    "granite-4.0-h-small": 6,
    "qwen3-next-80b-a3b": 4,
    "kimi-linear-48b-a3b": 4,
    "nemotron-3-nano-30b-a3b": 6,
    "lfm2-1.2b": 3,
    "falcon-h1-0.5b": 2,
    "mamba-codestral-7b": 2,
    "olmo-hybrid-7b": 4,
}
# Page arrays that fit into VMEM (128 MiB) XLA moves there, so pools are as large as on four chips of a deployment.
BLOCKS = {
    "deepseek-v3.2": 16_384,
    "glm-5.2": 16_384,
    "deepseek-v4-flash": 65_536,
    "jamba-1.5-mini": 8192,
    "granite-4.0-h-small": 5000,
    "qwen3-next-80b-a3b": 8192,
    "kimi-linear-48b-a3b": 14_000,
    "nemotron-3-nano-30b-a3b": 4096,
    "lfm2-1.2b": 65_536,
    "falcon-h1-0.5b": 8192,
    "mamba-codestral-7b": 16_384,
    "olmo-hybrid-7b": 8192,
}
OF_ONE_SORT = ("deepseek-v3.2", "glm-5.2", "deepseek-v4-flash", "mamba-codestral-7b")
HYBRIDS = [model for model in BLOCKS if model not in OF_ONE_SORT]  # states and tokens
# Chips that share the heads at most. A quarter of Granite's and Falcon's channels is no multiple of 128, as their
# convolutions want, and OLMo hybrid has 30 heads.
SHARDS = {"granite-4.0-h-small": 2, "falcon-h1-0.5b": 2, "olmo-hybrid-7b": 2}


def compile_step(
    model: str, num_layers: int, timeout_s: float, flags: Sequence[str] = (), chip: str = "v6e", shards: int = 4
) -> dict[str, Any]:
    """The report of one step, or what went wrong."""
    command = [sys.executable, "-m", "scripts.lab.engine_step", chip, model, "--layers", str(num_layers)]
    most = SHARDS.get(model, 4)
    num_shards = min(shards, most)
    command += ["--blocks", str(BLOCKS[model] * num_shards // most)] if model in BLOCKS else []
    command += ["--shards", str(num_shards), *flags]
    start = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        lines, error = done.stdout.splitlines(), done.stderr.strip().splitlines()[-1:]
    except subprocess.TimeoutExpired:
        lines, error = [], [f"no end within {timeout_s:.0f} s"]
    report = json.loads(lines[-1]) if lines else {"error": " ".join(error)}
    return {"model": model, "layers": num_layers, "seconds": time.monotonic() - start, **report}


def is_good(report: dict[str, Any]) -> bool:
    """Whether the step compiled and every page array is in place."""
    from scripts.lab.engine_step import is_in_place

    return "error" not in report and is_in_place(report)


def line(report: dict[str, Any]) -> str:
    """One line of the table."""
    name = f"{report['model']:24} {report['layers']:2} layers {report['seconds']:5.0f} s"
    if "error" in report:
        return f"{name}  failed: {report['error']}"
    return (
        f"{name}  {report['aliased_arrays']:3} of {report['page_arrays']:3} page arrays aliased, "
        f"{report['page_copies']} copied, {report['kernel_calls']:3} kernel calls, "
        f"{report['temp_bytes'] / 2**20:8.1f} MiB of temporaries"
    )


def main(arguments: list[str]) -> int:
    """Exit status: 0, or 1 where a step is not in place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=sorted(STEPS), help="repeatable; default: all")
    parser.add_argument("--chip", choices=sorted(CHIPS), default="v6e", help="default: v6e")
    parser.add_argument("--shards", type=int, choices=(1, 2, 4), default=4, help="chips that share heads; default: 4")
    parser.add_argument("--one-memory", action="store_true", help="pools of unlike pages share their memory")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=900, metavar="SECONDS", help="of one step")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the reports go")
    options = parser.parse_args(arguments)
    reports = []
    print(f"libtpu {version('libtpu')}, jax {version('jax')}, {options.chip}, {options.shards} chips", flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        flags = ["--one-memory"] if options.one_memory else []
        models = options.model or [model for model in STEPS if not flags or model in HYBRIDS]
        where = options.timeout, flags, options.chip, options.shards
        for report in pool.map(lambda model: compile_step(model, STEPS[model], *where), models):
            reports.append(report)
            print(line(report), flush=True)
    if options.json:
        options.json.write_text(json.dumps(reports, indent=2) + "\n")
    return int(not all(map(is_good, reports)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Compiles a TPU kernel on a machine without a TPU, and prints what it costs by the compiler's own listing.

    python scripts/tpu_compile.py v6e ragged_paged_attention page=16 window=1024      one case
    python scripts/tpu_compile.py v6e ragged_paged_attention --features               base case, then each feature
    python scripts/tpu_compile.py v7x kv_write --no-dump                              does it compile, its memory
    python scripts/tpu_compile.py v6e selective_scan --loops 'ssd_.*'                 loops of kernels without a score

Needs libtpu (kvjax[tpu-aot]). Settings: the fields of the op's cases.py, or model=NAME shards=N. What the score means
and leaves out: scripts/lab/tpu/score.py; times, by a latency that is assumed: scripts/lab/tpu/latency.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pallas_kernels.mask import MaskRule
from scripts.lab.compiled import compiled_types, mask_of
from scripts.lab.tpu.bundles import Loop
from scripts.lab.tpu.chips import CHIPS, prepare_environment
from scripts.lab.tpu.compiler import Compilation, CompilationError, compile_and_dump
from scripts.lab.tpu.latency import LATENCIES_S
from scripts.lab.tpu.libtpu import LibtpuError, release
from scripts.lab.tpu.score import BlockScore, block_scores
from scripts.lab.tpu.step_cost import launch_work

DECODE = "rpa_q1_"  # kernels whose sequences have a cost (scripts/lab/tpu/step_cost.py)
COLUMNS = "{:24} {:22} {:7} {:>7} {:>6} {:>14} {:>10} {:>5} {:>9} {:>7} {:>14}"
LATENCIES = "/".join(f"{latency_s * 1e6:g}" for latency_s in LATENCIES_S)
HEADER = COLUMNS.format(
    "",
    "kernel",
    "block",
    "bundles",
    "spills",
    "largest unit",
    "DMA cycles",
    "share",
    "in flight",
    "hidden",
    f"us, L {LATENCIES}",
)
SEQUENCES = (8192, 256)  # tokens, decoding


def scores(chip: str, compilation: Compilation) -> list[BlockScore]:
    """Of all kernels and kinds of blocks."""
    token_bytes = compilation.memory["token_bytes"]
    return [score for kernel in compilation.kernels for score in block_scores(kernel, CHIPS[chip], token_bytes)]


def row(label: str, chip: str, score: BlockScore) -> str:
    """A line of the table; *hidden*: bundles between the start of a block's DMA and the wait for it."""
    unit, count = score.bound
    cycles, share = f"{score.dma_cycles:.0f}", f"{score.dma_share:.2f}"
    return COLUMNS.format(
        label,
        score.kernel,
        score.kind,
        score.bundles,
        score.spill_bundles,
        f"{unit} {count}",
        cycles,
        share,
        f"{score.in_flight_bytes / 2**20:.1f} MiB",
        f"{score.hidden_bundles:.0f}",
        "/".join(f"{score.seconds(CHIPS[chip], latency_s) * 1e6:.2f}" for latency_s in LATENCIES_S),
    )


def sequence_rows(chip: str, compilation: Compilation, mask: MaskRule) -> list[str]:
    """A line for each of `SEQUENCES` and each kernel called `DECODE`."""
    lines, token_bytes = [], compilation.memory["token_bytes"]
    for kernel in compilation.kernels:
        if not kernel.name.startswith(DECODE):
            continue
        for tokens in SEQUENCES:
            work = launch_work(kernel, mask, token_bytes, [(tokens, 1)])
            times = "/".join(f"{work.seconds(CHIPS[chip], latency_s) * 1e6:.2f}" for latency_s in LATENCIES_S)
            hbm = work.hbm_seconds(CHIPS[chip]) * 1e6
            lines.append(
                f"{kernel.name}, {tokens} tokens: {work.bundles:.0f} bundles, HBM {hbm:.2f} us, "
                f"{work.ring.buffers} buffers, {times} us at L = {LATENCIES} us"
            )
    return lines


def describe_memory(compilation: Compilation) -> str:
    """Lines on memory."""
    lines = []
    for name, memory in compilation.memory["kernels"].items():
        vmem = memory["vmem_bytes"]
        vmem_text = "unknown" if vmem is None else f"{vmem / 2**20:.2f} MiB"
        lines.append(f"{name}: VMEM {vmem_text}, SMEM {memory['smem_bytes'] / 1024:.1f} KiB")
    return "\n".join(lines)


def describe_loops(loop: Loop, depth: int = 0) -> list[str]:
    """A line for each loop: bundles of a trip, those without the loops inside, fills and spills, units."""
    units = sorted(loop.units.items(), key=lambda unit: -unit[1])[:4]
    text = ", ".join(f"{name} {count}" for name, count in units)
    spills = f"spills {loop.num_spills}"
    line = f"{'  ' * depth}{loop.num_bundles} bundles, own {loop.own_bundles}, DMAs {loop.num_dmas}, {spills}: {text}"
    return [line, *(line for inner in loop.inner for line in describe_loops(inner, depth + 1))]


def main(arguments: list[str]) -> int:
    """Exit status: 0, or 1 where something did not compile."""
    types = compiled_types("tpu")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chip", choices=sorted(CHIPS))
    parser.add_argument("op", choices=sorted(types))
    parser.add_argument("settings", nargs="*", metavar="name=value")
    parser.add_argument("--features", action="store_true", help="the case with each feature of the op")
    parser.add_argument("--no-dump", action="store_true", help="compile only")
    parser.add_argument("--loops", metavar="PATTERN", help="print all loops of the kernels whose names match")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="of one compilation")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument(
        "--libtpu",
        default="installed",
        metavar="RELEASE",
        help="installed, newest, previous, pinned (by jax), a version",
    )
    options = parser.parse_args(arguments)
    try:
        libtpu = release(options.libtpu)
    except LibtpuError as error:
        parser.error(str(error))
    case_type = types[options.op]
    features = ("", *case_type.tpu_features) if options.features else ("",)
    figures, failed = [], False
    pattern = options.loops or (None if options.no_dump else case_type.scored or None)
    for label in features:
        settings = [*options.settings, *label.split()]
        try:
            compilation = compile_and_dump(
                options.chip,
                options.op,
                settings,
                kernels=pattern,
                timeout_s=options.timeout,
                libtpu=libtpu,
            )
        except CompilationError as error:
            print(f"{label}: does not compile\n{error}", file=sys.stderr)
            failed = True
            continue
        if not label:
            print(f"libtpu {libtpu.version}", describe_memory(compilation), sep="\n")
            if pattern and not options.loops:
                print(HEADER)
        for kernel in compilation.kernels if options.loops else ():
            print(kernel.name, *describe_loops(kernel.loop, 1), sep="\n")
        found = [] if options.loops else scores(options.chip, compilation)
        for score in found:
            print(row(label, options.chip, score), flush=True)
        if any(score.kernel.startswith(DECODE) for score in found):
            mask = mask_of(options.op, settings)
            print(*sequence_rows(options.chip, compilation, mask), sep="\n", flush=True)
        figures.append({"label": label, "memory": compilation.memory, "scores": [asdict(score) for score in found]})
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    prepare_environment()
    sys.exit(main(sys.argv[1:]))

"""Compiles a TPU kernel on a machine without a TPU, and prints what it costs by the compiler's own listing.

    python scripts/tpu_compile.py v6e attention page=16 window=1024      one case
    python scripts/tpu_compile.py v6e attention --features               base case, and what each feature adds
    python scripts/tpu_compile.py v7x attention --no-dump                only: does it compile, and its memory
    python scripts/tpu_compile.py v6e selective_scan --loops 'ssd_.*'    the loops of kernels without a score

Needs libtpu (kvjax[tpu-aot]). Settings: the fields of scripts/tpu_aot/operations.py. What the score means
and leaves out: scripts/tpu_aot/score.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.tpu_aot.bundles import Loop
from scripts.tpu_aot.chips import CHIPS
from scripts.tpu_aot.compiler import Compilation, CompilationError, compile_and_dump
from scripts.tpu_aot.score import BlockScore, block_scores

OPS = (
    "attention",
    "kv_write",
    "latent_write",
    "mla_attention",
    "sparse_attention",
    "indexer_topk",
    "compressor_update",
    "causal_conv1d",
    "selective_scan",
    "gated_delta_rule",
    "copy_pages",
    "zero_pages",
    "gather_pages",
    "scatter_pages",
)
KERNELS = {"attention": "rpa_.*", "mla_attention": "mla_.*"}  # names of those that have a score
# One feature at a time, then all together.
FEATURES: dict[str, list[str]] = {
    "base": [],
    "window": ["window=1024"],
    "chunk": ["chunk=2048"],
    "sink tokens": ["window=1024", "sink_tokens=4"],
    "sinks": ["sinks=1"],
    "scales": ["scales=1"],
    "lse": ["lse=1"],
    "tables in HBM": ["hbm_tables=1"],
    "write": ["write=1"],
    "all of these": ["window=1024", "sink_tokens=4", "sinks=1", "scales=1", "lse=1", "hbm_tables=1", "write=1"],
    "soft cap": ["soft_cap=30.0"],
    "fp8 e4m3 pages": ["dtype=float8_e4m3fn"],
    "fp8 e5m2 pages": ["dtype=float8_e5m2"],
    "int8 pages": ["dtype=int8"],
    "float32 pages": ["dtype=float32"],
    "head dim 64": ["head_dim=64"],
    "head dim 80": ["head_dim=80"],
    "head dim 96": ["head_dim=96"],
    "head dim 192": ["head_dim=192"],
    "head dim 256": ["head_dim=256"],
}
COLUMNS = "{:16} {:22} {:7} {:>7} {:>6} {:>14} {:>10} {:>5}"
HEADER = COLUMNS.format("", "kernel", "block", "bundles", "spills", "largest unit", "DMA cycles", "share")


def scores(chip: str, compilation: Compilation) -> list[BlockScore]:
    """Of all kernels and kinds of blocks."""
    token_bytes = compilation.memory["token_bytes"]
    return [score for kernel in compilation.kernels for score in block_scores(kernel, CHIPS[chip], token_bytes)]


def row(label: str, score: BlockScore) -> str:
    """A line of the table."""
    unit, count = score.bound
    cycles, share = f"{score.dma_cycles:.0f}", f"{score.dma_share:.2f}"
    return COLUMNS.format(
        label, score.kernel, score.kind, score.bundles, score.spill_bundles, f"{unit} {count}", cycles, share
    )


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chip", choices=sorted(CHIPS))
    parser.add_argument("op", choices=OPS)
    parser.add_argument("settings", nargs="*", metavar="name=value")
    parser.add_argument("--features", action="store_true", help="the case with each feature of attention")
    parser.add_argument("--no-dump", action="store_true", help="compile only")
    parser.add_argument("--loops", metavar="PATTERN", help="print all loops of the kernels whose names match")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="of one compilation")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args(arguments)
    cases = FEATURES if options.features else {"": []}
    figures, failed = [], False
    pattern = options.loops or (None if options.no_dump else KERNELS.get(options.op))
    for number, (label, extra) in enumerate(cases.items()):
        try:
            compilation = compile_and_dump(
                options.chip, options.op, options.settings + extra, kernels=pattern, timeout_s=options.timeout
            )
        except CompilationError as error:
            print(f"{label}: does not compile\n{error}", file=sys.stderr)
            failed = True
            continue
        if number == 0:
            print(describe_memory(compilation))
            if pattern and not options.loops:
                print(HEADER)
        for kernel in compilation.kernels if options.loops else ():
            print(kernel.name, *describe_loops(kernel.loop, 1), sep="\n")
        found = [] if options.loops else scores(options.chip, compilation)
        for score in found:
            print(row(label, score), flush=True)
        figures.append({"label": label, "memory": compilation.memory, "scores": [asdict(score) for score in found]})
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

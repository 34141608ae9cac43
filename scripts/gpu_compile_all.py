"""Compiles every GPU kernel at every real shape for sm_90a, without a GPU; a table, and a status for CI.

    python scripts/gpu_compile_all.py                       all, one after the other; about 30 s a case
    python scripts/gpu_compile_all.py --op kv_write         of one op
    python scripts/gpu_compile_all.py --subset              what CI runs, four minutes on two cores
    python scripts/gpu_compile_all.py --results all.json    goes on where an earlier run was stopped

Shapes: the layers of models that an op's cases.py names, on one of 1, 2, 4 and 8 tensor-parallel shards, each set of
sizes once; then the op's `features`. Fails where a kernel spills more than the op's `allowed_spills` says, needs more
shared memory than there is, donated pages are not updated in place, or a layer launches more than `MOST_LAUNCHES`.
Where: see scripts/gpu_compile.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from pallas_kernels.cases.case import Case
from scripts.gpu_compile import compile_op, problems, report
from scripts.lab.compiled import compiled_types, shape_settings
from scripts.lab.gpu.operations import LAYERS

SHARDS = (1, 2, 4, 8)
LAYER_CASES = (
    "",
    "scan=0 layers=1",
    "scan=0",
    "sinks=1 scales=1",
    "head_dim=64 window=128 sinks=1 heads=64",
    "heads=32 kv_heads=4",
    "queries=4",
    "queries=8 scan=0 sinks=1",
    "op=mla heads=128 page=64",
    "op=mla heads=16 page=64",
    "op=mla heads=128 page=64 scan=0",
    "op=mla heads=128 page=64 queries=4",
    "op=mla heads=16 page=64 queries=4",
    "op=mla heads=128 page=64 sinks=1",
    "op=mla heads=16 page=64 sinks=1 scan=0",
    "op=sparse heads=64 page=64 sinks=1 scan=0",
    "op=sparse heads=64 page=64 sinks=1",
    "op=sparse heads=64 page=64 sinks=1 fp8=1 scan=0",
    "op=sparse heads=64 page=64 sinks=1 fp8=1",
    "op=sparse heads=64 page=64 ratio=128",
    "op=sparse heads=64 page=64 ratio=0",
)
LAYERS_IN_SUBSET = ("sinks=1 scales=1",)
# Pages in slabs, of which some end with rows that are no page's.
IN_SLABS = {
    "ragged_paged_attention": ("slabs=17 rest=32 heads=16 kv_heads=2 head_dim=256",),
    "gated_delta_rule": ("slabs=1 rest=96",),
    "causal_conv1d": ("slabs=1 rest=1024",),
    "selective_scan": ("slabs=1 rest=96",),
    "mla_paged_attention": ("slabs=3 page=64 rest=36",),
}
# Of layers, as `Case.allowed_spills`: 64 x 256 sums of latents leave addresses no registers.
ALLOWED_SPILL_BYTES = {("op=mla", "mla_"): 120, ("op=sparse", "sparse_mla_"): 380}


def cases(subset: bool) -> list[tuple[str, str]]:
    """(op, settings) of every compilation; the subset has every op."""
    types = compiled_types("gpu")
    found = {op: case_type.in_subset if subset else _settings(case_type) for op, case_type in types.items()}
    found = {op: (*some, *IN_SLABS.get(op, ())) for op, some in found.items()}
    found[LAYERS] = LAYERS_IN_SUBSET if subset else LAYER_CASES
    return [(op, settings) for op, some in found.items() for settings in some]


def _settings(case_type: type[Case]) -> tuple[str, ...]:
    """Settings of an op: shapes by shards, those of equal cases once, then its features."""
    settings = [settings for shards in SHARDS for _, settings in shape_settings(case_type, shards)]
    return (*dict.fromkeys(" ".join(some) for some in settings), *case_type.features)


def allowed_spill_bytes(op: str, settings: str, record: dict[str, Any]) -> int:
    """Committed spills of a kernel."""
    allowed = ALLOWED_SPILL_BYTES if op == LAYERS else compiled_types("gpu")[op].allowed_spills
    kernel = record.get("kernel", "")
    found = [spilled for (setting, name), spilled in allowed.items() if setting in settings and kernel.startswith(name)]
    return max(found, default=0)


@dataclass(frozen=True)
class Result:
    """What came of one case."""

    card: str
    op: str
    settings: str
    seconds: float
    records: list[dict[str, Any]]  # of `compile_op`; none where it does not compile
    error: str | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """What names it among others."""
        return self.card, self.op, self.settings

    @property
    def problems(self) -> list[str]:
        """What is wrong, in words."""
        if self.error is not None:
            return [self.error]
        allowed = [allowed_spill_bytes(self.op, self.settings, record) for record in self.records]
        return [found for pair in zip(self.records, allowed, strict=True) for found in problems(*pair)]


def compile_case(card: str, op: str, settings: str, timeout_s: float) -> Result:
    """Compiles one case."""
    start = time.monotonic()
    try:
        records = compile_op(card, op, settings.split(), timeout_s)
    except RuntimeError as error:
        return Result(card, op, settings, time.monotonic() - start, [], str(error))
    return Result(card, op, settings, time.monotonic() - start, records)


def save(path: Path, results: Iterable[Result]) -> None:
    """Writes results as JSON."""
    path.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


def load(path: Path) -> list[Result]:
    """Results that `save` wrote; none where there is no file."""
    return [Result(**data) for data in json.loads(path.read_text())] if path.exists() else []


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subset", action="store_true", help="a few shapes, as CI does")
    ops = sorted({op for op, _ in cases(subset=False)})
    parser.add_argument("--op", action="append", choices=ops, help="repeatable; default: all")
    parser.add_argument("--card", default="h100", choices=("h100", "h200"))
    parser.add_argument("--timeout", type=float, default=1800, metavar="SECONDS", help="of one compilation")
    parser.add_argument("--results", type=Path, metavar="FILE", help="written as cases end; those in it are kept")
    options = parser.parse_args(argv)
    work = [(options.card, *case) for case in cases(options.subset) if case[0] in (options.op or ops)]
    results = {result.key: result for result in (load(options.results) if options.results else []) if not result.error}
    for key in work:
        if key not in results:
            result = results[key] = compile_case(*key, options.timeout)
            print(f"{' '.join(key)}: {result.seconds:.0f} s", *result.problems, sep="\n  ", file=sys.stderr, flush=True)
            if options.results:
                save(options.results, results.values())
    asked = [results[key] for key in work]
    if records := [record for result in asked for record in result.records]:
        print(report(records))
    wrong = [problem for result in asked for problem in result.problems]
    print("\n".join([f"{len(asked)} cases, {len(wrong)} problems", *wrong]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

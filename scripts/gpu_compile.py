"""Compiles the GPU kernels on a machine without a GPU; prints registers, spills, shared memory, key instructions.

    python scripts/gpu_compile.py OP [name=value ...] [--card h100] [--check] [--ceiling] [--json FILE]

OP: one of pallas_kernels, whose cases.py has the settings (or model=NAME shards=N), or `layers`: those of
scripts/lab/gpu/layer_case.py. `--check` fails where a kernel spills or exceeds shared memory, donated pages are not
updated in place, or a layer launches too much; `--ceiling` prints what the inner loop of each kernel costs, and what it
can do at best at 1.7 GHz (scripts/lab/gpu/ceiling.py). Needs the extra `cuda-aot` (public wheels, no driver and no
card) in the Python that runs this, or in the one that KVJAX_CUDA_PYTHON names.

Two rows for one kernel: `linked` is what this jax makes where nvJitLink is installed (`setmaxnreg` ignored), `alone`
what ptxas makes of the same PTX by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SHARED_BYTES = 232_448  # of one thread block on Hopper
COLUMNS = ("how", "registers", "spill_store_bytes", "spill_load_bytes", "shared_bytes")
MODULE_COLUMNS = ("donated_bytes", "aliased_bytes", "temporary_bytes", "copies")
MOST_LAUNCHES = 4  # of a layer, beside the write of its KV


def compile_op(card: str, op: str, settings: list[str], timeout_s: float | None = None) -> list[dict[str, Any]]:
    """One record of the module, and one per kernel and way to compile it; each with its `case`.

    Raises:
        RuntimeError: the compiler refused or ran out of time, or CUDA's wheels are missing.
    """
    python = os.environ.get("KVJAX_CUDA_PYTHON", sys.executable)
    with tempfile.TemporaryDirectory() as dump:
        command = [python, "-m", "scripts.lab.gpu.compile_one", card, op, dump, *settings]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{op} {' '.join(settings)}: no end after {timeout_s} s") from error
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        hint = "" if "cuda" not in done.stderr.lower() else "; is the extra 'cuda-aot' installed? see KVJAX_CUDA_PYTHON"
        raise RuntimeError(f"{op} {' '.join(settings)}: {' '.join(last)}{hint}")
    case = f"{op} {' '.join(settings)}".strip()
    return [{"case": case, **json.loads(line)} for line in done.stdout.splitlines() if line.startswith("{")]


def problems(record: dict[str, Any], allowed_spill_bytes: int = 0) -> list[str]:
    """What is wrong with a kernel, or with the module around it, in words."""
    if "module" in record:
        found = []
        if record["aliased_bytes"] < record["donated_bytes"]:
            expected, got = record["donated_bytes"], record["aliased_bytes"]
            found.append(f"{record['case']}: expected {expected} bytes updated in place, got {got}")
        if record["donated_bytes"] and record["temporary_bytes"] >= record["donated_bytes"]:
            found.append(f"{record['case']}: expected less temporary bytes than pages, got {record['temporary_bytes']}")
        if record["copies"]:
            found.append(f"{record['case']}: expected no copy of a page array, got {record['copies']}")
        for step, count in record.get("launches_by_layer", {}).items():
            if count > MOST_LAUNCHES:
                found.append(f"{record['case']}: expected at most {MOST_LAUNCHES} launches a {step} layer, got {count}")
        return found
    found, name = [], f"{record['case']}: {record['kernel'].removesuffix('_mosaic_gpu_kernel')} ({record['how']})"
    spilled = record["spill_store_bytes"] + record["spill_load_bytes"]
    if spilled > allowed_spill_bytes:
        expected = f"at most {allowed_spill_bytes} bytes of spills" if allowed_spill_bytes else "no spills"
        found.append(f"{name}: expected {expected}, got {spilled} bytes")
    if (record["shared_bytes"] or 0) > SHARED_BYTES:
        found.append(f"{name}: expected at most {SHARED_BYTES} bytes shared, got {record['shared_bytes']}")
    return found


def report(records: list[dict[str, Any]]) -> str:
    """Kernels, then modules, as text."""
    modules = [record for record in records if "module" in record]
    kernels = [record for record in records if "module" not in record]
    rows = [["case", *MODULE_COLUMNS], *([record[name] for name in ("case", *MODULE_COLUMNS)] for record in modules)]
    parts = ([table(kernels)] if kernels else []) + ([_aligned(rows)] if modules else [])
    of_layers = [record for record in modules if record.get("launches_by_layer")]
    return "\n\n".join(parts + ([_launch_table(of_layers)] if of_layers else []))


def _launch_table(modules: list[dict[str, Any]]) -> str:
    """Launches of a layer, KV write apart, and of the plan that all layers share."""
    rows = [["case", "step", "launches_a_layer", "launches_to_plan"]]
    rows += [
        [record["case"], step, count, record["launches_to_plan"][step]]
        for record in modules
        for step, count in record["launches_by_layer"].items()
    ]
    return _aligned(rows)


def table(records: list[dict[str, Any]]) -> str:
    """The kernels' records as text."""
    used = [name for name in records[0]["sass"] if any(record["sass"][name] for record in records)]
    rows = [["case", "kernel", *COLUMNS, *used]]
    for record in records:
        values = [record["case"], record["kernel"].removesuffix("_mosaic_gpu_kernel")]
        values += [record[name] for name in COLUMNS] + [record["sass"][name] for name in used]
        rows.append(values)
    return _aligned(rows)


def ceilings(records: list[dict[str, Any]]) -> str:
    """Ceilings of the kernels that have one, as text: cycles of a multiprocessor for one KV block."""
    found = [record for record in records if record.get("ceiling")]
    names = list(found[0]["ceiling"]) if found else []
    rows = [["case", "kernel", "how", *names]]
    for record in found:
        kernel = record["kernel"].removesuffix("_mosaic_gpu_kernel")
        rows.append([record["case"], kernel, record["how"], *(record["ceiling"][name] for name in names)])
    return _aligned(rows)


def _aligned(cells: list[list[Any]]) -> str:
    rows = [[str(cell) for cell in row] for row in cells]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(x.ljust(width) for x, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("op")
    parser.add_argument("settings", nargs="*", metavar="name=value")
    parser.add_argument("--card", default="h100", choices=("h100", "h200"))
    parser.add_argument("--check", action="store_true", help="fail on spills and on too much shared memory")
    parser.add_argument("--ceiling", action="store_true", help="cycles of each kernel's inner loop, and what binds")
    parser.add_argument("--json", type=Path, help="also write the records here")
    arguments = parser.parse_args(argv)
    records = compile_op(arguments.card, arguments.op, arguments.settings)
    print(report(records))
    if arguments.ceiling:
        print("", ceilings(records), sep="\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(records, indent=1) + "\n")
    wrong = [line for record in records for line in problems(record)] if arguments.check else []
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

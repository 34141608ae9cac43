"""Tunes the GPU attention kernel by time on the card; without one compiles the candidates and times nothing.

    python scripts/tune_gpu.py h100 --results h100-results.json            goes on where it was stopped
    python scripts/tune_gpu.py h100 --model llama3-8b --tp 1 --page 64     one entry

On a machine with the card every candidate, and the kernel's formula, runs in a process of its own: microseconds of a
decode step and of a prefill, by scripts/lab/bench/time_cases.py. An entry goes to tuned/<card>.json only where it
saves the margin. On a machine without a GPU (extra `cuda-aot`, see scripts/gpu_compile.py) the candidates are compiled
for the card: registers, spills and shared memory, no times, and no file is written.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pallas_kernels.gpu.mosaic import NUM_SMS
from pallas_kernels.ragged_paged_attention.kernel_gpu import Tuning
from pallas_kernels.ragged_paged_attention.tuning import FOLDER, OP
from pallas_kernels.tuned import Sizes
from scripts.gpu_compile import compile_op
from scripts.lab.gpu.target import CARDS
from scripts.lab.tuning.choice import Record, as_json, write_tuned
from scripts.lab.tuning.entries import Entry, candidates
from scripts.lab.tuning.tuner import entries_of, list_entries, measured, parser, tune

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("decode", "prefill")  # kinds of steps, each with a kernel of its own
RING_SIZES = tuple(product((64, 128), (2, 3, 4)))  # (slots of a KV block, stages)
PREFILL_WARPGROUPS = (3, 2)  # one of them fetches; the first that attends does
_COLUMNS = "{:28} {:9} {:36} {:8} {:>9} {:>7} {:>7}"
HEADER = _COLUMNS.format("case", "part", "sizes", "how", "registers", "spills", "shared")


def candidates_of(_: Entry) -> Iterator[Sizes]:
    """The formula; blocks and stages, the same of both parts; prefill with and without a warpgroup that only fetches,
    and with a thread block a multiprocessor; decoding with more thread blocks than the card has multiprocessors."""
    decode = [{"decode_block": block, "decode_stages": stages} for block, stages in RING_SIZES]
    prefill = [
        {"prefill_block": block, "prefill_stages": stages, "prefill_warpgroups": warpgroups}
        for warpgroups in PREFILL_WARPGROUPS
        for block, stages in RING_SIZES
    ]
    prefill.append({"prefill_blocks": NUM_SMS})
    yield from candidates([*decode, {"num_blocks": 2 * NUM_SMS}], prefill)


def part_sizes(part: str, sizes: Sizes) -> dict[str, int]:
    """The entries of `sizes` that have an influence on the part."""
    return {name: n for name, n in sizes.items() if name.startswith(part) or (part, name) == ("decode", "num_blocks")}


def timed(entry: Entry, sizes: Sizes, timeout_s: float) -> Record:
    """A candidate's microseconds, on this machine's card, of the parts of which it has a size; of both without one."""
    own = {part: part_sizes(part, sizes) for part in PARTS}
    cases = {part: asdict(entry.timed(part, sizes)) for part in PARTS if not sizes or own[part]}
    try:
        found = _time([OP, json.dumps(cases)], timeout_s)
    except RuntimeError as error:
        return {"error": str(error)}
    return {part: {"sizes": own[part], "cost": cost} for part, cost in found.items()}


def card_here() -> str | None:
    """The card of this machine; asked for in another process, so that this one holds none of its memory."""
    return _time([], 120)


def _time(arguments: list[str], timeout_s: float) -> Any:
    command = [sys.executable, "-m", "scripts.lab.bench.time_cases", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"no end after {timeout_s} s") from error
    if done.returncode:
        raise RuntimeError(" ".join(done.stderr.strip().splitlines()[-1:]))
    return json.loads(done.stdout.splitlines()[-1])


def compiled(card: str, entry: Entry, sizes: Sizes, timeout_s: float) -> Record:
    """A candidate's resources, without a card; its cost is not known."""
    try:
        found = compile_op(card, OP, [*entry.settings(sizes), "write=0"], timeout_s=timeout_s)
    except RuntimeError as error:
        return {"error": str(error)}
    record: Record = {}
    for kernel in (line for line in found if "kernel" in line):
        part = next((part for part in PARTS if kernel["kernel"].startswith(f"rpa_{part}")), None)
        if part is not None and (not sizes or part_sizes(part, sizes)):
            own = {"sizes": part_sizes(part, sizes), "cost": None, "kernels": []}
            record.setdefault(part, own)["kernels"].append(kernel)
    return record


def dry_run(options: argparse.Namespace) -> int:
    """Lists what the candidates need; 1 where a formula does not compile."""
    failed = False
    print(HEADER, flush=True)
    for entry in entries_of(options):
        wanted = [_compiled_sizes(sizes) for sizes in candidates_of(entry)]
        wanted = wanted[:1] + [sizes for sizes in wanted[1:] if sizes]
        records = measured(
            entry, wanted, lambda entry, sizes: compiled(options.device, entry, sizes, options.timeout), options
        )
        failed |= "error" in records[0]
        print("\n".join(row for record in records for row in resource_rows(entry, record)), flush=True)
    return int(failed)


def _compiled_sizes(sizes: Sizes) -> Sizes:
    """`sizes` but for those that compile to the same."""
    return {name: size for name, size in sizes.items() if name != "num_blocks"}


def resource_rows(entry: Entry, record: Record) -> Iterator[str]:
    """Lines of the dry run's table."""
    for part, own in record.items() if "error" not in record else ():
        for kernel in own["kernels"]:
            spilled = kernel["spill_store_bytes"] + kernel["spill_load_bytes"]
            words = " ".join(f"{name.removeprefix(part + '_')}={size}" for name, size in own["sizes"].items())
            figures = (kernel["how"], kernel["registers"], spilled, kernel["shared_bytes"])
            yield _COLUMNS.format(entry.label, part, words or "formula", *(str(figure) for figure in figures))


def main(arguments: Iterable[str] | None = None) -> int:
    """Exit status: 0, or 1 where a formula's sizes fail."""
    assert __doc__ is not None
    made = parser(__doc__, CARDS)
    made.add_argument("--dry-run", action="store_true", help="as where there is no GPU")
    options = made.parse_args(None if arguments is None else list(arguments))
    if options.list:
        return list_entries(options, candidates_of)
    card = None if options.dry_run else card_here()
    if card is None:
        return dry_run(options)
    if card != options.device:
        made.error(f"expected the card of this machine, {card}, or --dry-run, got {options.device}")
    wanted = entries_of(options)
    chosen = tune(wanted, candidates_of, lambda entry, sizes: timed(entry, sizes, options.timeout), options)
    write_tuned(options.out or FOLDER / f"{card}.json", "time", Tuning._fields, chosen)
    if options.json:
        options.json.write_text(as_json(chosen))
    return int({choice.entry for choice in chosen} != set(wanted))


if __name__ == "__main__":
    sys.exit(main())

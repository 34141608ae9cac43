"""Tunes the TPU attention kernel on a machine without a TPU, by the compiler's own listing.

    python scripts/tune_tpu.py v6e --results v6e-results.json             goes on where it was stopped
    python scripts/tune_tpu.py v7x --model llama3-8b --tp 8 --page 16     one entry

Needs libtpu (kvjax[tpu-aot]). Every candidate is compiled in a process of its own: the formula's sizes, then halves and
doubles of them. Its cost: the nanoseconds of a few sequences (scripts/lab/tpu/step_cost.py) by the static score and a
latency of 1 us (scripts/lab/tpu/latency.py), which rank variants and are no times. An entry goes to tuned/<chip>.json
only where it saves the margin, and loses less than that at 0.5 and 2 us.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pallas_kernels.ragged_paged_attention.tpu_tuning import Tuning, tile_queries
from pallas_kernels.ragged_paged_attention.tuning import FOLDER, OP
from pallas_kernels.tpu.mosaic import LANES
from pallas_kernels.tuned import Sizes
from scripts.lab.tpu.chips import CHIPS, prepare_environment
from scripts.lab.tpu.compiler import CompilationError, compile_and_dump
from scripts.lab.tpu.latency import LATENCIES_S, USUAL_LATENCY_S
from scripts.lab.tpu.score import block_scores
from scripts.lab.tpu.step_cost import launch_work, workloads
from scripts.lab.tuning.choice import Record, as_json, write_tuned
from scripts.lab.tuning.entries import Entry, candidates
from scripts.lab.tuning.tuner import entries_of, list_entries, parser, tune

TILE_BLOCKS = (256, 512, 1024)  # slots
DECODE_BLOCKS = (256, 512, 1024, 2048)


def candidates_of(entry: Entry) -> Iterator[Sizes]:
    """The formula, then tiles of its queries, half and double as many, and blocks of decoding."""
    heads, kv_heads = entry.model.per_shard(entry.num_shards)
    queries = tile_queries(heads // kv_heads, entry.mask)
    tiles = product((queries, 2 * queries, queries // 2), TILE_BLOCKS)
    blocks = [block for block in DECODE_BLOCKS if block >= max(LANES, entry.page_size)]
    yield from candidates(
        [{"queries": n, "tile_block": block} for n, block in tiles if n >= 8],
        [{"decode_block": block} for block in blocks],
    )


def measure(chip: str, entry: Entry, sizes: Sizes, timeout_s: float) -> Record:
    """Compiles a candidate: the cost of decoding and of tiles with the sizes that the kernels really have."""
    try:
        done = compile_and_dump(chip, OP, entry.settings(sizes), kernels="rpa_.*", timeout_s=timeout_s)
        token_bytes = done.memory["token_bytes"]
        scores = [block_scores(kernel, CHIPS[chip], token_bytes) for kernel in done.kernels]
        works = [
            [launch_work(kernel, entry.mask, token_bytes, sequences) for sequences in workloads(kernel)]
            for kernel in done.kernels
        ]
    except (CompilationError, ValueError) as error:  # ValueError: dumps that cannot be read
        return {"error": str(error)}
    record = {}
    for (full, masked), launches in zip(scores, works, strict=True):
        queries, block = full.queries, full.block_tokens
        nanoseconds = {
            latency_s: 1e9 * sum(work.seconds(CHIPS[chip], latency_s) for work in launches) for latency_s in LATENCIES_S
        }
        record["decode" if queries == 1 else "tiles"] = {
            "sizes": {"decode_block": block} if queries == 1 else {"queries": queries, "tile_block": block},
            "cost": nanoseconds[USUAL_LATENCY_S],
            "cost_at_latencies": {f"{latency_s * 1e6:g} us": cost for latency_s, cost in nanoseconds.items()},
            "full": asdict(full),
            "masked": asdict(masked),
        }
    return record


def main(arguments: Iterable[str] | None = None) -> int:
    """Exit status: 0, or 1 where a formula's sizes do not compile."""
    assert __doc__ is not None
    options = parser(__doc__, CHIPS).parse_args(None if arguments is None else list(arguments))
    if options.list:
        return list_entries(options, candidates_of)
    wanted = entries_of(options)
    chosen = tune(
        wanted, candidates_of, lambda entry, sizes: measure(options.device, entry, sizes, options.timeout), options
    )
    path = options.out or FOLDER / f"{options.device}.json"
    write_tuned(path, "static score", Tuning._fields, chosen)
    if options.json:
        options.json.write_text(as_json(chosen))
    return int({choice.entry for choice in chosen} != set(wanted))


if __name__ == "__main__":
    prepare_environment()
    sys.exit(main())

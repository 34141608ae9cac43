"""Replays a trace under every eviction policy and retention interval; prints the tables of docs/eviction.md.

Flow:    trace, pool sizes x policies, models x intervals -> [compare] -> Markdown tables, JSON, a plot

    python scripts/compare_evictions.py mooncake_conversation.jsonl --json evictions.json --plot docs/eviction.png

One request at a time, as `kvjax replay --serial`. Results are kept in the JSON file after every run, and what is there
already is not run again: delete it to start anew.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.cli.options.replay import add_reading_arguments, reading_of
from kvjax.cli.options.types import int_list, positive_int
from kvjax.cli.pictures.colors import BOUND
from kvjax.cli.pictures.figures import compared, figure_legend, new_figure, save_figure
from kvjax.cli.running.output_files import plot_file
from kvjax.configs import load_model_config
from kvjax.replay import (
    REPLAY_POLICIES,
    WORKLOADS,
    ReplayConfig,
    TraceRequest,
    generate_workload,
    read_trace,
    run_replay,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLOCK_SIZE = 512
FULL_MODEL = "llama-3-8b"
PARITY_TOKENS = 30_500  # of that model; see kvjax/core/eviction/cost_aware.py
RETAINED_MODELS = ("gemma-3-27b", "qwen3-next-80b-a3b")
SHARES = (0.01, 0.025, 0.06, 0.16, 0.4)  # of a trace's distinct blocks
INTERVALS = (None, 8_192, 0)
RETENTION_POLICIES = ("lru", "slru")


def work_of(num_tokens: int) -> float:
    """The work of a prefix, in tokens without attention: token n costs `n / PARITY_TOKENS` more."""
    return num_tokens * (1 + num_tokens / (2 * PARITY_TOKENS))


@dataclass(frozen=True)
class Case:
    """One replay."""

    model: str
    num_blocks: int
    policy: str
    interval: int | None = None
    block_size: int = BLOCK_SIZE
    serial: bool = True

    @property
    def key(self) -> str:
        """Its name in the JSON file."""
        return " ".join(str(value) for value in asdict(self).values())

    def run(self, trace: Sequence[TraceRequest]) -> dict[str, Any]:
        """What the replay found."""
        recorder = run_replay(
            trace,
            ReplayConfig(
                specs=load_model_config(self.model).kv_cache_specs(self.block_size),
                num_blocks=self.num_blocks + 1,  # the null block
                hash_algorithm="xxhash_cbor",
                eviction_policy=self.policy,
                retention_interval=self.interval,
                serial=self.serial,
            ),
        ).recorder
        return {
            "hit_tokens": recorder.hit_tokens,
            "infinite_hit_tokens": recorder.infinite_hit_tokens,
            "prompt_tokens": recorder.prompt_tokens,
            "saved_work": sum(work_of(hit) for _, hit in recorder.hits) / sum(work_of(n) for n, _ in recorder.hits),
            "refused": recorder.refused,
            "registered_blocks": sum(pool.num_hashed_blocks + pool.num_evicted_blocks for pool in recorder.pools),
            "host_us": sum(recorder.host_ns) / 1e3 / len(recorder.host_ns),
        }


class Results:
    """Results by case, in a file."""

    def __init__(self, path: Path, trace: Sequence[TraceRequest], read_as: str, block_size: int) -> None:
        self._path = path
        self.trace = trace
        self.read_as, self.block_size = read_as, block_size
        self._known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def of(self, case: Case) -> dict[str, Any]:
        """The case's, run if it is not there yet."""
        case = replace(case, block_size=self.block_size)
        key = f"{self.read_as}; {len(self.trace)} of them; {case.key}"
        if key not in self._known:
            print(f"running {key}", file=sys.stderr)
            self._known[key] = case.run(self.trace)
            self._path.write_text(json.dumps(self._known, indent=2) + "\n", encoding="utf-8")
        return self._known[key]


def policy_table(results: Results, sizes: Iterable[int]) -> tuple[list[list[str]], dict[str, list[float]]]:
    """Rows of the table, each hit rate with the work saved, and the rates in percent by policy and of no eviction."""
    rows: list[list[str]] = []
    best: dict[str, Any] = {}
    rates: dict[str, list[float]] = {policy: [] for policy in (*REPLAY_POLICIES, "infinite")}
    for size in sorted(sizes):
        row, found = [f"{size:,}"], {}
        for policy in REPLAY_POLICIES:
            if policy == "belady" and rates[policy] and rates[policy][-1] == rates["infinite"][-1]:
                found = best  # a bound does not fall as the pool grows
            else:
                found = results.of(Case(FULL_MODEL, size, policy))
                best = found if policy == "belady" else best
            rates[policy].append(100 * found["hit_tokens"] / found["prompt_tokens"])
            row.append(f"{rates[policy][-1]:.2f} % ({100 * found['saved_work']:.2f} %)")
        rates["infinite"].append(100 * found["infinite_hit_tokens"] / found["prompt_tokens"])
        rows.append(row)
    return rows, rates


def retention_table(results: Results, models: Iterable[str], num_blocks: int) -> list[list[str]]:
    """Rows: model and interval; blocks that were cached, and the hit rate under each policy."""
    rows = []
    for model in models:
        for interval in INTERVALS:
            every = "everything" if interval is None else f"every {interval:,}" if interval else "ends and partings"
            found = [results.of(Case(model, num_blocks, policy, interval)) for policy in RETENTION_POLICIES]
            rates = [f"{100 * one['hit_tokens'] / one['prompt_tokens']:.2f} %" for one in found]
            rows.append([model, every, f"{found[-1]['registered_blocks']:,}", *rates])
    return rows


def gains_table(results: Results) -> list[list[str]]:
    """What `learned` hits more than `probation`, percent, at shares of the distinct blocks: serial, and in batches."""
    num_distinct = len({block for request in results.trace for block in request.hash_ids})
    rows = []
    for serial in (True, False):
        row = ["serial" if serial else "in batches"]
        for share in SHARES:
            size = max(int(share * num_distinct), 1)
            base, learned = (
                results.of(Case(FULL_MODEL, size, policy, serial=serial)) for policy in ("probation", "learned")
            )
            gain = 100 * (learned["hit_tokens"] / base["hit_tokens"] - 1) if base["hit_tokens"] else 0.0
            row.append(f"{100 * base['hit_tokens'] / base['prompt_tokens']:.2f} % {gain:+.1f}")
        rows.append(row)
    return rows


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(results: Results, sizes: Sequence[int], rates: Mapping[str, Sequence[float]]) -> Figure:
    """Hit rate by pool size, a line per policy, one for those that are equal; what no policy exceeds is grey."""
    trace = Path(results.read_as.partition(": ")[0]).name
    figure = new_figure(8.5, 5.2, f"How much of the prompts each eviction policy finds\n{trace}, one request at a time")
    axis = figure.subplots()
    axis.plot(sizes, rates["infinite"], ":", color=BOUND, linewidth=2, zorder=3, label="unlimited cache")
    axis.plot(sizes, rates["belady"], "--", color=BOUND, linewidth=2, label="belady: knows the trace")
    names: dict[tuple[float, ...], list[str]] = {}
    for policy in REPLAY_POLICIES:
        if policy != "belady":
            names.setdefault(tuple(rates[policy]), []).append(policy)
    for (line, policies), style in zip(names.items(), compared(), strict=False):
        axis.plot(sizes, line, label=", ".join(policies), **style)
    axis.set(xscale="log", xlabel=f"blocks of {results.block_size} tokens in the pool", ylabel="% of the prompt tokens")
    axis.set_ylim(bottom=0)
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    figure_legend(figure, axis)
    return figure


def main(arguments: list[str] | None = None) -> int:
    """Prints both tables; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", help="of any form of docs/guide/traces.md, or a generated workload")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="results, kept after every run")
    parser.add_argument("--plot", type=plot_file, metavar="FILE", help="draw the first table (png, pdf, svg)")
    parser.add_argument("--num-requests", type=positive_int, metavar="N", help="how many to read (default: all)")
    parser.add_argument(
        "--sizes", type=int_list, default=[2_000, 5_000, 10_000, 20_000, 50_000], metavar="N,N", help="of pools"
    )
    parser.add_argument(
        "--models", default=",".join(RETAINED_MODELS), metavar="A,B", help="of the second table (default: %(default)s)"
    )
    parser.add_argument(
        "--retention-requests", type=positive_int, default=4_000, metavar="N", help="of the trace, for the second table"
    )
    parser.add_argument("--block-size", type=positive_int, default=BLOCK_SIZE, metavar="N", help="tokens of a block")
    parser.add_argument("--retention-blocks", type=positive_int, default=20_000, metavar="N", help="of its pools")
    parser.add_argument("--gains", action="store_true", help="print only what `learned` gains over `probation`")
    add_reading_arguments(parser)
    options = parser.parse_args(arguments)
    told: list[str] = []
    if options.trace in WORKLOADS:
        trace = generate_workload(options.trace, options.num_requests or 6_000)
        told.append(f"{options.trace}: generated")
    else:
        trace = read_trace(options.trace, options.num_requests, reading_of(options), told.append)
    print(*told, file=sys.stderr)
    results = Results(options.json, trace, told[0], options.block_size)
    if options.gains:
        print(markdown(["full attention", *(f"{100 * share:g} %" for share in SHARES)], gains_table(results)))
        return 0
    rows, rates = policy_table(results, options.sizes)
    print(markdown(["blocks", *REPLAY_POLICIES], rows))
    infinite = rates["infinite"][-1]
    print(f"\nAn infinite cache: {infinite:.2f} %.\n")
    if options.plot is not None:
        save_figure(draw(results, sorted(options.sizes), rates), options.plot)
    head = ["model", "kept", "blocks cached", *RETENTION_POLICIES]
    results = Results(options.json, trace[: options.retention_requests], told[0], options.block_size)
    print(markdown(head, retention_table(results, options.models.split(","), options.retention_blocks)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

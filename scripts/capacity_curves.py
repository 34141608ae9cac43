"""Replays a trace over replicas with tiers, and with prefill and decode apart; prints the tables of docs/capacity.md.

Flow:    trace, host and disk sizes, numbers of replicas, splits -> [capacity] -> Markdown tables, JSON, a plot

    python scripts/capacity_curves.py mooncake_conversation.jsonl --json capacity.json --plot docs/capacity.png

Continuous batching in virtual time, as `kvjax replay --replicas N --router prefix`. Results are kept in the JSON file
after every run, and what is there already is not run again: delete it to start anew.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.cli.options.replay import add_reading_arguments, reading_of
from kvjax.cli.options.types import byte_size, non_negative_int, positive_int
from kvjax.cli.pictures.colors import BOUND
from kvjax.cli.pictures.figures import compared, figure_legend, new_figure, save_figure
from kvjax.cli.running.output_files import plot_file
from kvjax.configs import load_model_config
from kvjax.replay import (
    ReplayConfig,
    ReplayTierConfig,
    SplitConfig,
    TraceRequest,
    TransferConfig,
    fleet_json,
    read_trace,
    run_fleet,
    run_split,
)
from kvjax.replay.reports.fleet_report import side_values, time_values

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODEL, BLOCK_SIZE, ROUTER = "llama-3-8b", 512, "prefix"
GIB = 2**30
FIRST, SECOND, GAP = "time_to_first_token_seconds", "time_to_second_token_seconds", "inter_token_seconds"


@dataclass(frozen=True)
class Case:
    """One replay: mixed replicas, or `prefill` of them beside the others. Sizes in GiB, speeds in GB/s."""

    replicas: int
    memory: int = 52 * GIB
    host: int = 0  # of each replica
    disk: int = 0
    shares_disk: bool = True
    write_through: bool = False
    disk_speed: float = 5.0
    prefill: int = 0
    link_speed: float = 50.0

    def run(self, trace: Sequence[TraceRequest]) -> dict[str, Any]:
        """What the replay found."""
        tiers = ReplayTierConfig(
            host_bytes=self.host * GIB,
            disk_bytes=self.disk * GIB,
            shares_disk=self.shares_disk,
            write_through=self.write_through,
            disk_bytes_per_s=1e9 * self.disk_speed,
        )
        config = ReplayConfig(
            specs=load_model_config(MODEL).kv_cache_specs(BLOCK_SIZE),
            memory_bytes=self.memory,
            tiers=tiers if self.host or self.disk else None,
        )
        if not self.prefill:
            mixed = fleet_json(run_fleet(trace, config, self.replicas, ROUTER))
            kept = ("token_hit_rate", "infinite_token_hit_rate", "busy", "preemptions", FIRST, SECOND, GAP)
            return {name: mixed[name] for name in kept}
        split = SplitConfig(self.prefill, self.replicas - self.prefill, TransferConfig(1e9 * self.link_speed))
        apart = run_split(trace, config, split, ROUTER)
        return {
            "prefill": side_values(apart.prefill, apart.virtual_seconds),
            "decode": side_values(apart.decode, apart.virtual_seconds),
            "sent_bytes": apart.sent_bytes,
            **time_values(apart.prefill + apart.decode),
        }


class Results:
    """Results by case, in a file."""

    def __init__(self, path: Path, trace: Sequence[TraceRequest], read_as: str, memory: int) -> None:
        self._path, self._trace, self._read_as, self.memory = path, trace, read_as, memory
        self._known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    @property
    def num_requests(self) -> int:
        """The number of the trace's requests."""
        return len(self._trace)

    def of(self, replicas: int, **options: Any) -> dict[str, Any]:
        """The case's, run if it is not there yet."""
        case = Case(replicas, self.memory, **options)
        key = f"{self._read_as}; {' '.join(f'{name}={value}' for name, value in asdict(case).items())}"
        if key not in self._known:
            print(f"running {key}", file=sys.stderr)
            self._known[key] = case.run(self._trace)
            self._path.write_text(json.dumps(self._known, indent=2) + "\n", encoding="utf-8")
        return self._known[key]


def size_table(results: Results, replicas: int, hosts: Sequence[int], disks: Sequence[int]) -> list[list[str]]:
    """A row for each host size: hit rate and first token, mean and 90 %, for each size of a disk that all share."""
    rows = []
    for host in hosts:
        found = [results.of(replicas, host=host, disk=disk) for disk in disks]
        rows.append([_gib(host), *map(_rate_and_first, found)])
    return rows


def disk_table(results: Results, replicas: int, host: int, disk: int) -> list[list[str]]:
    """A row for each way to have a disk beside one size of host memory."""
    ways = (
        ("one for all", {"disk": disk}),
        ("one for all, write-through", {"disk": disk, "write_through": True}),
        ("one for all, 20 GB/s", {"disk": disk, "disk_speed": 20.0}),
        (f"{_gib(disk // replicas)} each", {"disk": disk // replicas, "shares_disk": False}),
    )
    found = [(name, results.of(replicas, host=host, **options)) for name, options in ways]
    return [[name, f"{100 * one['token_hit_rate']:.1f} %", *_first(one)] for name, one in found]


def replica_table(results: Results, numbers: Sequence[int], host: int) -> list[list[str]]:
    """A row for each number of replicas, without and with host memory."""
    rows = []
    for replicas in numbers:
        found = [results.of(replicas, host=size) for size in (0, host)]
        rows.append([str(replicas), *map(_rate_and_first, found)])
    return rows


def split_table(results: Results, replicas: int, host: int, link_speeds: Sequence[float]) -> list[list[str]]:
    """A row for each split, the mixed replicas last; slower links for the most even split."""
    cases = [(prefill, link_speeds[0]) for prefill in range(1, replicas)]
    cases += [(replicas // 2, speed) for speed in link_speeds[1:]]
    rows = []
    for prefill, speed in cases:
        one = results.of(replicas, host=host, prefill=prefill, link_speed=speed)
        sides = one["prefill"], one["decode"]
        rows.append(
            [
                f"{prefill} + {replicas - prefill}",
                f"{speed:g} GB/s",
                " / ".join(f"{100 * side['token_hit_rate']:.1f} %" for side in sides),
                " / ".join(f"{100 * side['busy']:.0f} %" for side in sides),
                f"{one['sent_bytes'] / GIB:,.0f} GiB",
                *_times(one),
            ]
        )
    mixed = results.of(replicas, host=host)
    rate, busy = (f"{100 * mixed[name]:.{digits}f} %" for name, digits in (("token_hit_rate", 1), ("busy", 0)))
    return [*rows, [f"{replicas} mixed", "-", rate, busy, "-", *_times(mixed)]]


def _gib(size: int) -> str:
    return f"{size:,} GiB" if size else "none"


def _first(found: dict[str, Any]) -> list[str]:
    return [f"{found[FIRST][name]:.2f} s" for name in ("mean", "p90")]


def _rate_and_first(found: dict[str, Any]) -> str:
    mean, most = _first(found)
    return f"{100 * found['token_hit_rate']:.1f} %, {mean} ({most})"


def _times(found: dict[str, Any]) -> list[str]:
    gap = found[GAP]
    return [
        f"{found[FIRST]['median']:.2f} s ({found[FIRST]['p90']:.2f} s)",
        f"{found[SECOND]['median']:.2f} s ({found[SECOND]['p90']:.2f} s)",
        f"{1e3 * gap['median']:.1f} ms ({1e3 * gap['p90']:.1f} ms)",
    ]


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(results: Results, replicas: int, hosts: Sequence[int], disks: Sequence[int]) -> Figure:
    """The first table: hit rate and first-token times by host size, a line for each disk."""
    rate: Callable[[dict[str, Any]], float] = lambda found: 100 * found["token_hit_rate"]  # noqa: E731
    panels = (
        ("Prompt tokens found in a cache", "% of the prompt tokens", rate),
        ("Time to first token, mean", "seconds", lambda found: found[FIRST]["mean"]),
        ("Time to first token, nine of ten", "seconds", lambda found: found[FIRST]["p90"]),
    )
    title = (
        f"What host memory and a shared disk give {replicas} replicas of {MODEL}\n"
        f"{results.num_requests:,} requests, {_gib(results.memory // GIB)} of cache on each replica's device"
    )
    figure = new_figure(11, 4.6, title)
    axes = figure.subplots(1, len(panels))
    ceiling = 100 * results.of(replicas, host=hosts[0], disk=disks[0])["infinite_token_hit_rate"]
    axes[0].axhline(ceiling, linestyle=":", linewidth=2, color=BOUND, label="one unlimited cache for all")
    for axis, (name, unit, value) in zip(axes, panels, strict=True):
        for disk, style in zip(disks, compared(), strict=False):
            line = [value(results.of(replicas, host=host, disk=disk)) for host in hosts]
            axis.plot(range(len(hosts)), line, label=f"shared disk: {_gib(disk)}", **style)
        axis.set_title(name, fontsize=11)
        axis.set(xlabel="host memory of each replica, GiB", ylabel=unit)
        axis.set_xticks(range(len(hosts)), [f"{host:,}" for host in hosts])
        axis.set_ylim(0, 1.08 * axis.get_ylim()[1])
        axis.grid(alpha=0.3)
    figure_legend(figure, axes[0])
    return figure


def main(arguments: list[str] | None = None) -> int:
    """Prints all tables; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", help="a trace of any form of docs/guide/traces.md")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="results, kept after every run")
    parser.add_argument("--plot", type=plot_file, metavar="FILE", help="draw the first table (png, pdf, svg)")
    parser.add_argument("--num-requests", type=positive_int, default=2_000, metavar="N", help="default: %(default)s")
    parser.add_argument("--replicas", type=positive_int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--memory", type=byte_size, default=52 * GIB, metavar="BYTES", help="of a replica's cache")
    parser.add_argument("--hosts", type=non_negative_int, nargs="+", default=[0, 64, 256, 1_024], metavar="GIB")
    parser.add_argument("--disks", type=non_negative_int, nargs="+", default=[0, 1_024, 4_096], metavar="GIB")
    parser.add_argument("--numbers", type=positive_int, nargs="+", default=[2, 4], metavar="N", help="of replicas")
    parser.add_argument("--links", type=float, nargs="+", default=[50.0, 5.0], metavar="X", help="GB/s of transfers")
    add_reading_arguments(parser)
    args = parser.parse_args(arguments)
    told: list[str] = []
    trace = read_trace(args.trace, args.num_requests, reading_of(args), told.append)
    print(*told, file=sys.stderr)
    results = Results(args.json, trace, told[0], args.memory)
    host, disk, most = args.hosts[len(args.hosts) // 2 - 1], args.disks[-1], args.hosts[-2]
    head = ["host of each", *(f"disk: {_gib(size)}" for size in args.disks)]
    print(markdown(head, size_table(results, args.replicas, args.hosts, args.disks)), flush=True)
    if args.plot is not None:
        save_figure(draw(results, args.replicas, args.hosts, args.disks), args.plot)
    head = ["prefill + decode", "links", "hits", "busy", "sent", "first token", "second token", "between tokens"]
    print("\n" + markdown(head, split_table(results, args.replicas, most, args.links)), flush=True)
    head = ["replicas", "no tiers", f"host: {_gib(most)} each"]
    print("\n" + markdown(head, replica_table(results, args.numbers, most)), flush=True)
    head = [f"disk beside {_gib(host)} of host", "tokens hit", "first token, mean", "90 %"]
    print("\n" + markdown(head, disk_table(results, args.replicas, host, disk)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

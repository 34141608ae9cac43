"""A slice of the sweep that a seed chooses: one case in ten, in an order of its own, for as long as there is time.

Usage:   scripts/test.sh -m sweep --sweep-slice SEED [--sweep-seconds 360]
Flow:    collected items, seed -> [in_slice] -> items that run;  time is over -> the others are left out, and counted

Cases are ordered by a digest of seed and node id. So a seed names its slice whatever else is collected, and what there
is no time for is other cases with every seed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

import pytest

SHARE = 10  # one case in so many
_LEFT_OUT = "left out: the sweep's time is over"


def add_options(parser: pytest.Parser) -> None:
    """`--sweep-slice` and `--sweep-seconds`."""
    group = parser.getgroup("sweep")
    group.addoption("--sweep-slice", metavar="SEED", help=f"run 1 of {SHARE} cases of the sweep, such as of a commit")
    group.addoption("--sweep-seconds", type=float, default=360.0, help="start no case later than this (360)")


def in_slice(node_ids: Sequence[str], seed: str) -> list[str]:
    """The node ids that run, in their order: a tenth of them, rounded up."""
    ordered = sorted(node_ids, key=lambda node_id: hashlib.sha256(f"{seed} {node_id}".encode()).digest())
    return ordered[: -(-len(ordered) // SHARE)]


class SweepSlice:
    """Runs a slice and says at the end what ran. Each process of pytest-xdist has one, and its own clock."""

    def __init__(self, seed: str, seconds: float) -> None:
        self._seed, self._seconds = seed, seconds
        self._start = time.monotonic()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keeps the slice."""
        by_id = {item.nodeid: item for item in items if item.get_closest_marker("sweep") is not None}
        kept = in_slice(list(by_id), self._seed)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in set(kept)])
        items[:] = [by_id[node_id] for node_id in kept]
        self._start = time.monotonic()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Leaves a case out that would begin too late."""
        if time.monotonic() - self._start > self._seconds:
            pytest.skip(_LEFT_OUT)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Seed, cases and time."""
        stats = terminalreporter.stats
        left_out = sum(_LEFT_OUT in str(report.longrepr) for report in stats.get("skipped", ()))
        ran = [report for kind in ("passed", "failed") for report in stats.get(kind, ()) if report.when == "call"]
        seconds = sum(report.duration for report in ran)
        terminalreporter.write_line(
            f"sweep slice of {self._seed}: {len(ran)} cases in {seconds:.0f} s of all processes, "
            f"{left_out} left out after {self._seconds:g} s"
        )

"""The table for the docs and the roofline, of what a journal holds.

Flow:    Journal -> [markdown, roofline_rows] -> table.md, roofline.png

Shares are of the copy and the product that the same run measured ("peaks"), for the bytes and operations that a case
cannot do without, by the clock of the whole op.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from scripts.first_light.headlines import HEADLINES, Headline
from scripts.first_light.journal import DONE, Record
from scripts.lab.bench.report import Peaks, Row

_HEAD = (
    "| case | op us | kernels us | launches | of copy | TFLOP/s | bar | others, us |",
    "|---|---|---|---|---|---|---|---|",
)


def peaks_of(records: Mapping[str, Record]) -> Peaks | None:
    """What the run measured."""
    found = records.get("peaks")
    if found is None or found.state != DONE:
        return None
    return Peaks(*(found.result[name] for name in ("bytes_per_s", "flops_per_s", "source")))


def markdown(records: Mapping[str, Record]) -> str:
    """Facts, the table of headline cases, and every row that failed."""
    facts, peaks = records.get("facts"), peaks_of(records)
    lines = [facts.result.get("words", "") if facts else "no facts of the card", ""]
    if peaks is not None:
        lines += [f"{peaks.bytes_per_s / 1e12:.2f} TB/s, {peaks.flops_per_s / 1e12:.0f} TFLOP/s: {peaks.source}", ""]
    lines += _HEAD
    lines += [_line(one, records, peaks) for one in HEADLINES if f"time: {one.name}" in records]
    failed = [record for record in records.values() if record.state != DONE]
    lines += ["", f"{len(records)} rows, {len(failed)} failed" + (":" if failed else "."), ""]
    lines += [f"- {record.row}: {record.state}, {_reason(record)}" for record in failed]
    return "\n".join(lines).rstrip() + "\n"


def roofline_rows(records: Mapping[str, Record]) -> Iterator[Row]:
    """A point for each time, of ours and of others."""
    for one in HEADLINES:
        for by, result in _timed(one, records):
            yield Row(one.name, one.op, by, result["num_bytes"], result["flops"], result["op_us"])


def _timed(one: Headline, records: Mapping[str, Record]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(who, result) of every time of a case, ours first."""
    for name, record in records.items():
        who, _, case = name.partition(": ")
        if case == one.name and "op_us" in record.result:
            yield ("kvjax" if who == "time" else who), record.result


def _line(one: Headline, records: Mapping[str, Record], peaks: Peaks | None) -> str:
    times = dict(_timed(one, records))
    mine = times.pop("kvjax", None)
    if mine is None:
        return f"| {one.name} | {_reason(records[f'time: {one.name}'])} | | | | | | |"
    seconds = mine["op_us"] * 1e-6
    share = None if peaks is None else mine["num_bytes"] / seconds / peaks.bytes_per_s
    tflops = mine["flops"] / seconds / 1e12
    bar, is_met = _bar(one, share, tflops)
    others = ", ".join(f"{who} {result['op_us']:,.0f}" for who, result in times.items())
    cells = (
        one.name,
        f"{mine['op_us']:,.1f}",
        _number(mine["kernel_us"]),
        _number(mine["launches"]),
        "" if share is None else f"{share:.0%}",
        f"{tflops:,.0f}",
        bar if is_met is None else f"{bar}: {'holds' if is_met else 'missed'}",
        others,
    )
    return "| " + " | ".join(cells) + " |"


def _bar(one: Headline, share: float | None, tflops: float) -> tuple[str, bool | None]:
    """What the case must reach, and whether it does."""
    if one.least_tflops is not None:
        return f"{one.least_tflops:.0f} TFLOP/s", tflops >= one.least_tflops
    if one.least_bandwidth is not None:
        return f"{one.least_bandwidth:.0%}", None if share is None else share >= one.least_bandwidth
    return "", None


def _reason(record: Record) -> str:
    return (record.result.get("words") or (record.tail.splitlines() or [record.state])[-1])[:160]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"

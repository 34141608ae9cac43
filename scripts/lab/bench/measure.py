"""One case: run in small without a device, or measured on one next to its rivals.

Flow:    BenchCase -> [dry_run | on_device] -> rows

A case that an implementation cannot do, or that fails, gives a row that says why; the others go on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from pallas_kernels.cases.case import Arguments, Case
from pallas_kernels.cases.compare import excess
from pallas_kernels.interpret import interpreted
from scripts.lab.bench.case import BenchCase
from scripts.lab.bench.chain import Call, Chain, num_rotated
from scripts.lab.bench.platform import Platform, Rival
from scripts.lab.bench.report import CANNOT, FAILED, KERNEL, Peaks, Row, row

_NOTE_LENGTH = 120
_ROTATED_IN_SMALL = 2


def dry_run(case: BenchCase, platform: Platform, *, by_reference: bool = False) -> Iterator[Row]:
    """The kernel interpreted, or the reference where there is no kernel, at the case's small size."""
    small = case.small
    if not by_reference:
        with interpreted(platform.name):
            calls = platform.interpreted_calls
            run = functools.partial(_chained_excess, small, platform.name, calls)
            found = _attempt(case, f"{KERNEL}, interpreted", lambda: {"excess": run()})
        yield found
        if found.excess is not None:
            return
    yield _attempt(case, "reference", lambda: {"excess": _chained_excess(small, "reference")})


def on_device(
    bench: BenchCase, platform: Platform, peaks: Peaks, repeats: int, rivals: bool, time_reference: bool = False
) -> Iterator[Row]:
    """The kernel compared with the reference and timed; then the rivals, and the reference if asked for."""
    case = bench.case
    seeds = range(num_rotated(case.work.num_bytes, platform.cache_bytes))
    try:
        rotated = [case.arguments(seed) for seed in seeds]
    except RuntimeError as error:
        yield row(bench, KERNEL, note=f"{FAILED}, no room for its arguments: {_short(error)}")
        return

    def timed(backend: str) -> dict[str, Any]:
        chain = Chain(functools.partial(case.call, backend), rotated, writes=case.writes)
        return {"timing": platform.time(chain, repeats), "peaks": peaks}

    def kernel() -> dict[str, Any]:
        found = _once(functools.partial(case.call, platform.name), rotated[0])
        return _compared(case, rotated[0], found) | timed(platform.name)

    yield _attempt(bench, KERNEL, kernel)
    if time_reference:
        rotated = [case.arguments(seed) for seed in seeds] if case.writes else rotated
        yield _attempt(bench, "reference", lambda: timed("reference"))
    if rivals:
        rotated = [case.arguments(seed) for seed in seeds] if case.writes else rotated
        for rival in platform.rivals(bench.case):
            run = functools.partial(_rival, rival, case, platform, rotated, repeats)
            yield _attempt(bench, rival.name, lambda run=run: {**run(), "peaks": peaks})


def _compared(case: Case, arguments: Arguments, found: Any) -> dict[str, Any]:
    """Next to the reference, or why there is none: at full size memory may not hold its intermediate arrays."""
    try:
        expected = _once(functools.partial(case.call, "reference"), arguments)
    except RuntimeError as error:
        return {"note": f"not compared: {_short(error)}"}
    return {"excess": excess(found, expected)}


def _rival(rival: Rival, case: Case, platform: Platform, rotated: list[Arguments], repeats: int) -> dict[str, Any]:
    """Compared where it is a JAX function, and timed."""
    if rival.call is None:
        return {"timing": rival.time([rival.prepare(a) for a in rotated], repeats), "note": rival.note}
    found = _once(rival.call, rival.prepare(rotated[0]))
    compared = _compared(case, rotated[0], found)
    notes = [note for note in (compared.pop("note", ""), rival.note) if note]
    timing = platform.time(Chain(rival.call, [rival.prepare(a) for a in rotated], writes=False), repeats)
    return {"timing": timing, "note": ", ".join(notes), **compared}


def _attempt(case: BenchCase, by: str, run: Callable[[], dict[str, Any]]) -> Row:
    """The row of what `run` finds. Whatever it raises is the row's note: compilers raise errors of many classes."""
    try:
        return row(case, by, **run())
    except NotImplementedError as error:
        return row(case, by, note=f"{CANNOT}: {_short(error)}")
    except Exception as error:
        return row(case, by, note=f"{FAILED}: {_short(error)}")


def _once(call: Call, arguments: Arguments) -> Any:
    """(Outputs, pages written); the given pages stay as they are."""
    return jax.block_until_ready(jax.jit(call)(arguments.pages, arguments.rest))


def _chained_excess(case: Case, backend: str, num_calls: int = _ROTATED_IN_SMALL) -> float:
    """Of a chain of so many calls, all of them; the expected results are single calls of the reference."""
    seeds = range(num_calls)
    reference = jax.jit(functools.partial(case.call, "reference"))
    expected = [reference(*case.arguments(seed)) for seed in seeds]
    chain = Chain(functools.partial(case.call, backend), [case.arguments(s) for s in seeds], writes=case.writes)
    found = jax.block_until_ready(chain.run())
    return excess(found, ([out for out, _ in expected], [written for _, written in expected]))


def _short(error: Exception) -> str:
    """Its first line."""
    return (str(error).splitlines() or [type(error).__name__])[0][:_NOTE_LENGTH]

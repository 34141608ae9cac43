"""What runs in the first 38 minutes on a card, in the order of what one would ask.

Flow:    card or dry run -> [stages] -> rows -> runner

    facts      the card, its peaks, every kernel once at a small size; the same under compute-sanitizer if it is found
    tests      the headline cases with the sizes that ship, at full size, next to the reference; the engine in bfloat16;
               the kernels' own tests
    headlines  times of these cases
    rivals     others on the attention cases
    tuning     three shapes
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from pallas_kernels.cases.find import case_types
from scripts.first_light.headlines import ATTENTION, HEADLINES, Headline
from scripts.first_light.runner import ROOT, Row, Stage
from scripts.lab.bench.rivals_gpu import NAMES

_PROGRAMS = "scripts.first_light.programs"
_TUNED = (("llama3-8b", "16"), ("llama3-8b", "64"), ("gpt-oss-120b-local", "16"))
_DRY_RIVALS = ("decode 1 x 128k", "prefill 8k, D 64")  # of a dry run, which has no card to break
# The kernels' rows see the card alone; a row that compares with the CPU starts a process that sees no card.
_ON_CARD = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
_ON_CPU = {"JAX_PLATFORMS": "cpu"}


def stages(out: Path, card: str | None) -> list[Stage]:
    """The stages of a machine with this card ("h100"); None: of a dry run."""
    return [
        Stage("facts", 6, tuple(facts(card))),
        Stage("tests", 9, tuple(tests(card))),
        Stage("headlines", 7, tuple(timed(card))),
        Stage("rivals", 8, tuple(others(card))),
        Stage("tuning", 8, tuple(tuning(out, card))),
    ]


def facts(card: str | None) -> Iterator[Row]:
    """The card, what it can do at most, and whether each kernel runs at all."""
    yield program("facts", "facts", [], card, limit_s=60)
    yield program("peaks", "peaks", [], card, limit_s=90)
    for op in sorted(case_types()):
        yield program(f"smoke {op}", "smoke", [op], card, limit_s=120)
    sanitizer = shutil.which("compute-sanitizer")
    for op in sorted(case_types()) if sanitizer and card else ():
        row = program(f"memory checked {op}", "smoke", [op], card, limit_s=180)
        checked = (sanitizer, "--error-exitcode", "9", *row.command)
        # One allocation a buffer: in a pool of jax's an access out of bounds is inside the pool.
        yield Row(row.name, checked, row.limit_s, {**row.environment, "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"})


def tests(card: str | None) -> Iterator[Row]:
    """Kernels against the reference at real sizes, the engine, and the kernels' tests."""
    for one in HEADLINES:
        yield program(f"right: {one.name}", "case", ["compare", one.name], card, limit_s=90)
    yield program("engine in bfloat16", "engine", [], card, limit_s=180, takes_dry_run=False)
    for path in sorted((ROOT / "tests" / "pallas_kernels").rglob("test_*gpu*.py")):
        name = str(path.relative_to(ROOT))
        options = ["-q", "-p", "no:cacheprovider", *(["--collect-only"] if card is None else [])]
        yield Row(name, (sys.executable, "-m", "pytest", *options, name), 240, dict(_ON_CARD if card else _ON_CPU))


def timed(card: str | None) -> Iterator[Row]:
    """A row for each case."""
    for one in HEADLINES:
        yield program(f"time: {one.name}", "case", ["time", one.name], card, limit_s=60)


def others(card: str | None) -> Iterator[Row]:
    """A row for each case and rival that may do it."""
    for one in rival_cases(card):
        for name in NAMES:
            yield program(f"{name}: {one.name}", "case", ["rival", one.name, name], card, limit_s=60)


def rival_cases(card: str | None) -> list[Headline]:
    """The attention cases whose sequences are of one length."""
    uniform = [one for one in HEADLINES if one.op == ATTENTION and one.kind != "mixed"]
    return [one for one in uniform if card is not None or one.name in _DRY_RIVALS]


def tuning(out: Path, card: str | None) -> Iterator[Row]:
    """Candidates of three shapes; the results stay in files beside the journal."""
    for shape, page in _TUNED:
        name = f"tune {shape}, page {page}"
        settings = ["--model", shape, "--tp", "1", "--page", page]
        files = ["--results", str(out / "tuning.json"), "--out", str(out / f"{card}.json")]
        command = [sys.executable, "scripts/tune_gpu.py", card or "h100", *settings]
        command += ["--list"] if card is None else ["--budget", "2.5", *files]
        yield Row(name, tuple(command), 170, dict(_ON_CARD if card else _ON_CPU))


def program(
    name: str, module: str, arguments: list[str], card: str | None, *, limit_s: float, takes_dry_run: bool = True
) -> Row:
    """A row of one of our programs."""
    dry = ["--dry-run"] if card is None and takes_dry_run else []
    command = (sys.executable, "-m", f"{_PROGRAMS}.{module}", *arguments, *dry)
    return Row(name, command, limit_s, dict(_ON_CARD if card else _ON_CPU))

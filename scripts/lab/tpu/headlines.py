"""Headline figures of the attention kernels: committed ones, and what the compiler says of them.

Flow:    headlines.json -> [read] -> Headline ... -> compilations, one for equal cases -> [measure] -> Outcome ...

A figure is what a case had when it was committed: it fails where it is exceeded. Its bar is what it is to reach, and
stands beside it. Units: *bundles* of a full block, per 512 tokens; *us a step*, of many full ones, by the model of
scripts/lab/tpu/latency.py at 1 us; *us* of a decoding sequence of so many tokens, by the same; *of HBM*, that over the
time that HBM needs for its KV; *k bundles* of a whole prefill; *bytes* of a token in HBM.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scripts.lab.compiled import mask_of
from scripts.lab.tpu.bundles import Kernel
from scripts.lab.tpu.chips import CHIPS, Chip
from scripts.lab.tpu.compiler import Compilation
from scripts.lab.tpu.latency import USUAL_LATENCY_S, Work
from scripts.lab.tpu.score import block_scores, kernel_name
from scripts.lab.tpu.step_cost import launch_work

FILE = Path(__file__).with_name("headlines.json")
_DIGITS = {"bundles": 0, "us a step": 2, "us": 2, "of HBM": 2, "k bundles": 0, "bytes": 0}


@dataclass(frozen=True)
class Headline:
    """One figure."""

    name: str
    chip: str
    op: str
    settings: tuple[str, ...]  # of the op's case
    unit: str
    tokens: int  # of the sequence; 512 of a block
    figure: float  # committed
    bar: float | None  # to be reached; None: there is none
    rivals: dict[str, float]  # their figures, by scripts/tpu_race.py

    @property
    def case(self) -> tuple[str, str, tuple[str, ...]]:
        """What is compiled for it."""
        return self.chip, self.op, self.settings

    def text(self, figure: float) -> str:
        """A figure in its unit's digits."""
        return f"{figure:,.{_DIGITS[self.unit]}f}"


@dataclass(frozen=True)
class Outcome:
    """What a headline came to."""

    headline: Headline
    figure: float  # rounded up to the digits that are told

    @property
    def fails(self) -> bool:
        """Whether the committed figure is exceeded."""
        return self.figure > self.headline.figure

    @property
    def row(self) -> tuple[str, ...]:
        """Cells of the table."""
        head = self.headline
        said = "exceeds the committed figure" if self.fails else "" if self.figure == head.figure else "better"
        bar = "-" if head.bar is None else head.text(head.bar)
        misses = "" if head.bar is None or self.figure <= head.bar else "bar not met"
        rivals = ", ".join(f"{name} {head.text(figure)}" for name, figure in head.rivals.items())
        told = ", ".join(filter(None, (said, misses)))
        return head.chip, head.name, head.unit, head.text(self.figure), head.text(head.figure), bar, rivals, told


def read(path: Path = FILE) -> tuple[str, list[Headline]]:
    """(version of libtpu that the committed figures are of, the headlines)."""
    data = json.loads(path.read_text())
    return data["libtpu"], [_headline(entry) for entry in data["headlines"]]


def write(path: Path, libtpu: str, outcomes: Iterable[Outcome]) -> None:
    """Commits what was measured."""
    entries = [_entry(replace(outcome.headline, figure=outcome.figure)) for outcome in outcomes]
    lines = ",\n  ".join(json.dumps(entry) for entry in entries)
    path.write_text(f'{{"libtpu": "{libtpu}", "headlines": [\n  {lines}\n]}}\n')


def measure(headline: Headline, compilation: Compilation) -> Outcome:
    """The figure of a compilation of the headline's case.

    Raises:
        ValueError: no kernel of the compilation has what it asks for.
    """
    figure = _UNITS[headline.unit](headline, compilation)
    digits = _DIGITS[headline.unit]
    return Outcome(headline, -(-round(figure * 10**digits, 6) // 1) / 10**digits)


def _full_block(headline: Headline, compilation: Compilation) -> float:
    full, _ = block_scores(_kernel(headline, compilation, is_decode=True), _chip(headline), _token_bytes(compilation))
    return full.bundles * headline.tokens / full.block_tokens


def _microseconds_of_step(headline: Headline, compilation: Compilation) -> float:
    full, _ = block_scores(_kernel(headline, compilation, is_decode=True), _chip(headline), _token_bytes(compilation))
    return full.seconds(_chip(headline), USUAL_LATENCY_S) * 1e6


def _microseconds(headline: Headline, compilation: Compilation) -> float:
    return _decode(headline, compilation).seconds(_chip(headline), USUAL_LATENCY_S) * 1e6


def _of_hbm(headline: Headline, compilation: Compilation) -> float:
    work, chip = _decode(headline, compilation), _chip(headline)
    return work.seconds(chip, USUAL_LATENCY_S) / work.hbm_seconds(chip)


def _prefill(headline: Headline, compilation: Compilation) -> float:
    kernel = _kernel(headline, compilation, is_decode=False)
    tokens = (headline.tokens, headline.tokens)
    return _launch(headline, compilation, kernel, tokens).bundles / 1000


def _bytes(headline: Headline, compilation: Compilation) -> float:
    return _token_bytes(compilation)


_UNITS: dict[str, Callable[[Headline, Compilation], float]] = {
    "bundles": _full_block,
    "us a step": _microseconds_of_step,
    "us": _microseconds,
    "of HBM": _of_hbm,
    "k bundles": _prefill,
    "bytes": _bytes,
}


def _decode(headline: Headline, compilation: Compilation) -> Work:
    kernel = _kernel(headline, compilation, is_decode=True)
    return _launch(headline, compilation, kernel, (headline.tokens, 1))


def _launch(headline: Headline, compilation: Compilation, kernel: Kernel, sequence: tuple[int, int]) -> Work:
    """The work of one sequence: (tokens, of which new)."""
    mask = mask_of(headline.op, list(headline.settings))
    return launch_work(kernel, mask, _token_bytes(compilation), [sequence])


def _kernel(headline: Headline, compilation: Compilation, *, is_decode: bool) -> Kernel:
    for kernel in compilation.kernels:
        if (kernel_name(kernel).sizes["q"] == 1) == is_decode:
            return kernel
    names = [kernel.name for kernel in compilation.kernels]
    raise ValueError(f"{headline.name}: expected a kernel of {'one query' if is_decode else 'tiles'}, got {names}")


def _chip(headline: Headline) -> Chip:
    return CHIPS[headline.chip]


def _token_bytes(compilation: Compilation) -> int:
    return compilation.memory["token_bytes"]


def _headline(entry: dict[str, Any]) -> Headline:
    return Headline(**{**entry, "settings": tuple(entry["settings"])})


def _entry(headline: Headline) -> dict[str, Any]:
    return {**vars(headline), "settings": list(headline.settings)}

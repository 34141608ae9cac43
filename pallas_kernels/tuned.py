"""Sizes that a tuner chose for a kernel on one device: the files, which ship with the package beside the kernel.

Flow:    scripts/tune_{tpu,gpu}.py -> <op>/tuned/<device>.json -> [tuned_sizes] -> the kernel's Tuning

    {"version": 1, "op": "ragged_paged_attention", "device": "v6e", "by": "static score",
     "entries": [{"shape": {"num_q_heads": 32, "page_size": 128, ...}, "sizes": {"tile_block": 256, ...}}]}

`shape` holds what decides, every name that the op has; `sizes` some of the names of the kernel's `Tuning`, positive
integers; `by` says what the tuner compared: "static score" or "time". A size or an entry that is not there, and a
device without a file, are left to the kernel's formulas. A kernel's explicit `tuning` argument goes before the file.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

VERSION = 1
Shape: TypeAlias = Mapping[str, int | str | None]
Sizes: TypeAlias = Mapping[str, int]
_REMEDY = "tune again (scripts/tune_tpu.py, scripts/tune_gpu.py), or delete the file to use the formulas"


@dataclass(frozen=True)
class Table:
    """A file of sizes."""

    op: str
    device: str
    by: str
    entries: dict[str, tuple[Shape, Sizes]] = field(default_factory=dict)  # by `key_of` the shape

    def sizes(self, shape: Shape) -> Sizes:
        """The tuned sizes of `shape`; empty where there is no entry."""
        return self.entries.get(key_of(shape), ({}, {}))[1]

    def text(self) -> str:
        """As the file has it: an entry a line, in the order of their shapes."""
        head = json.dumps({"version": VERSION, "op": self.op, "device": self.device, "by": self.by})[:-1]
        entries = [{"shape": dict(shape), "sizes": dict(sizes)} for _, (shape, sizes) in sorted(self.entries.items())]
        lines = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
        return f'{head}, "entries": [\n{lines}\n]}}\n'


def key_of(shape: Shape) -> str:
    """Names a shape among others, whatever the order of its names."""
    return json.dumps(dict(shape), sort_keys=True)


def read_table(path: Path, op: str, shape_names: Sequence[str], size_names: Sequence[str]) -> Table:
    """The file at `path`, named after its device.

    Raises:
        ValueError: it is not of the format above; the message names what was expected, and the remedy.
        OSError: it cannot be read.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise _wrong(path, "JSON", str(error)) from error
    found = data if isinstance(data, dict) else {}
    for name, expected in (("version", VERSION), ("op", op), ("device", path.stem)):
        if found.get(name) != expected:
            raise _wrong(path, f"{name} {expected!r}", repr(found.get(name)))
    if not isinstance(found.get("by"), str) or not isinstance(found.get("entries"), list):
        raise _wrong(path, "a text 'by' and a list 'entries'", repr(sorted(found)))
    table = Table(op, path.stem, found["by"])
    for entry in found["entries"]:
        shape, sizes = _checked_entry(path, entry, shape_names, size_names)
        if key_of(shape) in table.entries:
            raise _wrong(path, "one entry for each shape", f"two for {key_of(shape)}")
        table.entries[key_of(shape)] = (shape, sizes)
    return table


def tuned_sizes(folder: Path, device: str | None, op: str, shape: Shape, size_names: tuple[str, ...]) -> dict[str, int]:
    """Sizes for `shape` in `folder`'s file of `device`; none where there is no such file or entry.

    The file is read once per process.

    Raises:
        ValueError: the file is not of the format above.
    """
    if device is None:
        return {}
    table = _cached_table(folder / f"{device}.json", op, tuple(shape), size_names)
    return {} if table is None else dict(table.sizes(shape))


@functools.cache
def _cached_table(path: Path, op: str, shape_names: tuple[str, ...], size_names: tuple[str, ...]) -> Table | None:
    return read_table(path, op, shape_names, size_names) if path.exists() else None


def _checked_entry(
    path: Path, entry: Any, shape_names: Sequence[str], size_names: Sequence[str]
) -> tuple[Shape, Sizes]:
    shape, sizes = (entry.get("shape"), entry.get("sizes")) if isinstance(entry, dict) else (None, None)
    if not isinstance(shape, dict) or not isinstance(sizes, dict):
        raise _wrong(path, "entries of a 'shape' and 'sizes'", repr(entry))
    if set(shape) != set(shape_names):
        raise _wrong(path, f"a shape of {sorted(shape_names)}", repr(sorted(shape)))
    if not sizes or any(name not in size_names or type(size) is not int or size < 1 for name, size in sizes.items()):
        raise _wrong(path, f"sizes out of {sorted(size_names)}, positive integers", repr(sizes))
    return shape, sizes


def _wrong(path: Path, expected: str, got: str) -> ValueError:
    return ValueError(f"{path}: expected {expected}, got {got}; {_REMEDY}")

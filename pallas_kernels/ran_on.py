"""Which kernels gave right results on which kinds of chip, and a log line for one that never ran on this kind.

Flow:    kvjax check --record -> ran_on.json -> [tell_untried] -> logger `pallas_kernels`, once for each op and chip

    {"NVIDIA H100 80GB HBM3": {"gpu": ["kv_write", ...], "triton": [...]}}

A chip is named as jax names its `device_kind`, an op as the backends' choice names it ("OP in slabs" is not OP).
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax

RECORD = Path(__file__).with_name("ran_on.json")
logger = logging.getLogger("pallas_kernels")


def chip() -> str:
    """The kind of the device that jax computes on by default."""
    return jax.devices()[0].device_kind


def record(ran: Mapping[str, Iterable[str]]) -> None:
    """Adds the ops of each backend that ran right on this kind of chip.

    Raises:
        OSError: the package's folder cannot be written.
    """
    chips = _read()
    known = chips.setdefault(chip(), {})
    for backend, ops in ran.items():
        known[backend] = sorted({*known.get(backend, ()), *ops})
    RECORD.write_text(json.dumps(chips, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def tell_untried(op: str, backend: str) -> None:
    """Logs once that the op's kernel has no record of a right result on this kind of chip, unless there is none."""
    if jax.devices()[0].platform != "cpu":
        _tell_untried(op, backend, chip())


@functools.cache
def _tell_untried(op: str, backend: str, kind: str) -> None:
    if op not in _read().get(kind, {}).get(backend, ()):
        logger.warning(
            "%s: the %s kernel was never run on a %s; `kvjax check` compares kernels with references",
            op,
            backend,
            kind,
        )


def _read() -> dict[str, dict[str, list[str]]]:
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}

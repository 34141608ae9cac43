"""What differs between the two benchmark scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import jax

from pallas_kernels.cases.case import Arguments, Case
from scripts.lab.bench.chain import Call, Chain
from scripts.lab.bench.report import Peaks
from scripts.lab.bench.timing import Timing


class Rival(NamedTuple):
    """Another implementation of an op, on the same numbers.

    `prepare` gives the arguments in its own layout, untimed. `time` replaces the chain where it is no JAX function.
    """

    name: str
    prepare: Callable[[Arguments], Arguments]
    call: Call | None = None
    time: Callable[[list[Arguments], int], Timing] | None = None  # of the case's rotated arguments and repeats
    note: str = ""


@dataclass(frozen=True)
class Platform:
    """A kind of device and how to measure on it."""

    name: str  # "tpu" or "gpu": the kernels' backend
    device_kind: str  # jax.devices' name of the platform
    pages: tuple[int, ...]  # sizes by default
    cache_bytes: int
    peaks: Callable[[jax.Device], Peaks]
    time: Callable[[Chain, int], Timing]
    interpreted_calls: int  # of one program that the interpreter can run
    rivals: Callable[[Case], Iterable[Rival]]

    def device(self) -> jax.Device | None:
        """One, where this machine has one."""
        try:
            return jax.devices(self.device_kind)[0]
        except RuntimeError:
            return None

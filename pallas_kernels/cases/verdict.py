"""Four steps of a small case of an op on this machine's devices against its oracle.

Flow:    case type, backend, seed -> [check_op] -> Verdict

On a CPU kernels are interpreted. On a chip its own kernels are compiled and run, and those of other chips are not.
"""

from __future__ import annotations

import time
import zlib
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from pallas_kernels.cases.case import Case, Results
from pallas_kernels.cases.compare import largest_difference
from pallas_kernels.interpret import compile_for

OK, FAILED, CANNOT = "ok", "failed", "cannot"
_CHIP_OF = {"tpu": "tpu", "gpu": "gpu", "triton": "gpu"}  # backend -> jax's platform


_STEPS = 4  # of a case, compiled once: some are hard because they are empty


@dataclass(frozen=True)
class Verdict:
    """What a case came to. `difference` is relative to an array's largest value where that is above 1."""

    op: str
    backend: str
    case: dict[str, Any]  # its fields; none where none was made
    size: str = ""  # sequences and tokens
    difference: float | None = None  # of the array that is worst by its tolerance
    tolerance: float | None = None
    outcome: str = OK
    reason: str = ""  # why it is not ok
    seconds: float = 0.0  # compilation included


def check_op(case_type: type[Case], backend: str, seed: int) -> Verdict:
    """Draws a case by `seed`, runs it and compares it. What the op or its case raises is the verdict's reason."""
    platform = jax.default_backend()
    if platform != "cpu" and _CHIP_OF.get(backend, platform) != platform:
        reason = f"it needs a {_CHIP_OF[backend].upper()}, jax's devices are {platform}"
        return Verdict(case_type.op, backend, {}, outcome=CANNOT, reason=reason)
    start = time.perf_counter()
    found: dict[str, Any] = {}
    try:
        _run(case_type, backend, np.random.default_rng([seed, zlib.crc32(case_type.op.encode())]), found)
    except NotImplementedError as error:
        found |= {"outcome": CANNOT, "reason": str(error)}
    except Exception as error:  # whatever a compiler or a device says of it
        found |= {"outcome": FAILED, "reason": f"{type(error).__name__}: {error}"}
    return Verdict(case_type.op, backend, **{"case": {}} | found, seconds=time.perf_counter() - start)


def _run(case_type: type[Case], backend: str, rng: np.random.Generator, found: dict[str, Any]) -> None:
    """Puts what is known of the case into `found`, and raises where it is wrong."""
    case = case_type.random(rng, backend)
    found |= {"case": asdict(case), "size": case.size}
    steps = [case.hard_arguments(rng) for _ in range(_STEPS)]
    run = compile_for(backend, partial(case.call, backend), *steps[0], watch_races=False)
    for arguments in steps:
        results = Results(*run(*arguments))
        difference, tolerance = largest_difference(results, case.expected(arguments))
        if difference >= found.get("difference", 0.0):
            found |= {"difference": difference, "tolerance": tolerance}
        case.assert_right(results, arguments)

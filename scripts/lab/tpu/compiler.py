"""Runs one compilation in a process of its own, with the compiler's dumps read back.

Flow:    chip + op + settings -> [compile_and_dump] -> Compilation

A process of its own, because libtpu reads its flags once, when it is loaded, and because a dump may abort or hang; so
each compilation can have another release of libtpu, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.lab.tpu.bundles import Kernel, read_dumps
from scripts.lab.tpu.chips import ENVIRONMENT
from scripts.lab.tpu.libtpu import Release

ROOT = Path(__file__).resolve().parents[3]
_DUMP_FLAGS = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final_.*"


class CompilationError(RuntimeError):
    """The compiler refused, died or ran out of time."""


@dataclass(frozen=True)
class Compilation:
    """What came back."""

    memory: dict[str, Any]  # of compile_one
    kernels: list[Kernel]  # empty without dumps


def last_lines(said: str) -> str:
    """What is told of a compiler's standard error."""
    return "\n".join(said.splitlines()[-12:])


def environment(libtpu: Release | None) -> dict[str, str]:
    """The environment of a process that compiles with `libtpu`; None: the one beside jax."""
    return {**os.environ, **ENVIRONMENT, **(libtpu.environment if libtpu else {}), "PYTHONPATH": str(ROOT)}


def compile_and_dump(
    chip: str,
    op: str,
    settings: list[str],
    *,
    kernels: str | None,
    timeout_s: float = 300,
    libtpu: Release | None = None,
) -> Compilation:
    """Compiles `op` for `chip`; `kernels`: pattern of names of those whose dumps are read, None: no dumps.

    `libtpu`: the compiler; None: the one beside jax.

    Raises:
        CompilationError: with the last lines that the compiler said.
    """
    command = [sys.executable, "-m", "scripts.lab.tpu.compile_one", chip, op, *settings]
    return run_and_read(command, f"{chip} {op} {settings}", kernels=kernels, timeout_s=timeout_s, libtpu=libtpu)


def run_and_read(
    command: list[str], what: str, *, kernels: str | None, timeout_s: float, libtpu: Release | None
) -> Compilation:
    """Runs a command that compiles and prints a line of JSON last, and reads its dumps; `what`: for errors.

    Raises:
        CompilationError: with the last lines that the compiler said.
    """
    with tempfile.TemporaryDirectory(prefix="kvjax-tpu-dump-") as folder:
        variables = environment(libtpu)
        if kernels is not None:
            variables["LIBTPU_INIT_ARGS"] = _DUMP_FLAGS.format(folder)
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise CompilationError(f"{what}: no end after {timeout_s} s") from error
        if done.returncode:
            raise CompilationError(f"{what}: exit status {done.returncode}\n{last_lines(done.stderr)}")
        memory = json.loads(done.stdout.splitlines()[-1])
        return Compilation(memory, [] if kernels is None else read_dumps(Path(folder), kernels))

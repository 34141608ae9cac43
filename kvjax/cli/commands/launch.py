"""`kvjax launch`: a program in several processes on this machine, which are all started again when one of them fails.

Flow:    arguments -> [run] -> processes, their output line by line -> exit status

Every process gets JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, which `kvjax.device.join_processes`
reads, and the number of starts before this one in KVJAX_NUM_RESTARTS. Once one has failed the others have some seconds
to end by themselves, as they do when they lose one, and are killed then. A computation cannot take a process back, so
all start again; a program whose requests go through a `ProcessFront` goes on with those that are owed.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from kvjax.cli.help_text import Example, default_text
from kvjax.cli.options.types import non_negative_int, positive_int

EXAMPLES = (
    Example(
        "Run a program in two processes, each with one virtual CPU device.",
        "kvjax launch --processes 2 --cpu-devices 1 -- python program.py",
    ),
    Example("Let its first failure end all.", "kvjax launch -n 2 --restarts 0 -- python program.py --steps 10"),
)
END_S = 10.0  # in which processes end that have lost another


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `kvjax launch`."""
    parser.add_argument("-n", "--processes", type=positive_int, default=2, metavar="N", help="Start N processes.")
    parser.add_argument(
        "--cpu-devices",
        type=positive_int,
        metavar="N",
        help=f"Give each process N virtual CPU devices.{default_text('real devices')}",
    )
    parser.add_argument(
        "--restarts", type=non_negative_int, default=3, metavar="N", help="Start all again at most N times."
    )
    parser.add_argument(
        "program", nargs="+", metavar="-- PROGRAM", help="Run this program with the arguments behind it."
    )


def run(args: argparse.Namespace) -> int:
    """The exit status of the last start: 0, or that of the process that failed first."""
    num_restarts = 0
    while True:
        end = Group(args.program, args.processes, args.cpu_devices, num_restarts).wait()
        if end is None:
            return 0
        is_last = num_restarts >= args.restarts
        print(
            f"kvjax launch: process {end.process} {_ending(end.status)}; the others ended within {end.others_s:.1f} s; "
            f"{'no restart is left' if is_last else 'all start again'}",
            file=sys.stderr,
            flush=True,
        )
        if is_last:
            return end.status if end.status > 0 else 128 - end.status
        num_restarts += 1


@dataclass(frozen=True)
class Failure:
    """Why a start has ended."""

    process: int  # that failed first
    status: int  # its exit status; negative: a signal
    others_s: float  # from its end to that of the last of the others


class Group:
    """One start of all processes."""

    def __init__(self, program: list[str], number: int, num_cpu_devices: int | None, num_restarts: int) -> None:
        told = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{_free_port()}", "JAX_NUM_PROCESSES": str(number)}
        told["KVJAX_NUM_RESTARTS"] = str(num_restarts)
        if num_cpu_devices is not None:
            told |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(num_cpu_devices)}
            told["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
        self._ends: queue.Queue[int] = queue.Queue()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        for index in range(number):
            environment = os.environ | told | {"JAX_PROCESS_ID": str(index)}
            self._start(
                index, subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            )

    def wait(self) -> Failure | None:
        """Waits for the end of all; None: all have ended well."""
        failed: int | None = None
        failed_s = 0.0
        left = set(range(len(self._processes)))
        try:
            while left:
                try:
                    index = self._ends.get(timeout=None if failed is None else failed_s + END_S - time.monotonic())
                except (queue.Empty, ValueError):  # ValueError: it is too late already
                    self._kill()
                    index = self._ends.get()
                left.discard(index)
                if self._processes[index].returncode and failed is None:
                    failed, failed_s = index, time.monotonic()
            took_s = time.monotonic() - failed_s
        finally:
            self._kill()
            for thread in self._threads:
                thread.join()
        return None if failed is None else Failure(failed, self._processes[failed].returncode, took_s)

    def _start(self, index: int, process: subprocess.Popen[bytes]) -> None:
        self._processes.append(process)
        assert process.stdout is not None
        assert process.stderr is not None
        jobs = [
            threading.Thread(target=_pass_on, args=(index, process.stdout, sys.stdout)),
            threading.Thread(target=_pass_on, args=(index, process.stderr, sys.stderr)),
            threading.Thread(target=self._note_end, args=(index, process)),
        ]
        for job in jobs:
            job.start()
        self._threads += jobs

    def _note_end(self, index: int, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        self._ends.put(index)

    def _kill(self) -> None:
        """By SIGKILL: jax takes SIGTERM for the notice of a preemption, and goes on."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()


def _pass_on(index: int, lines: IO[bytes], stream: IO[str]) -> None:
    """Lines of one process, with its number before them."""
    with lines:
        for line in lines:
            stream.write(f"[{index}] {line.decode(errors='replace')}")
            stream.flush()


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])

"""A process that loses another says which, and ends within seconds; one that ends well is no loss."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvjax.device.mesh.peers import LOST_STATUS

SWEEP = pytest.mark.sweep
ROOT = Path(__file__).parents[3]
MOST_S = 5.0  # from a death to the end of the others


def start(number: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """So many processes of `peers_program`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    told = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    told |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(number)}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.device.mesh.peers_program", *arguments],
            env=os.environ | told | {"JAX_PROCESS_ID": str(i)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(number)
    ]


@pytest.mark.parametrize(
    ("what", "victim", "number"),
    [
        ("collective", 1, 2),
        ("exchange", 0, 2),
        *[pytest.param(what, victim, 2, marks=SWEEP) for what in ("compute", "fail") for victim in (0, 1)],
        pytest.param("collective", 0, 2, marks=SWEEP),
        pytest.param("exchange", 1, 2, marks=SWEEP),
        pytest.param("collective", 1, 3, marks=SWEEP),
        pytest.param("compute", 2, 3, marks=SWEEP),
        pytest.param("strangers", 1, 3, marks=SWEEP),
    ],
)
def test_the_others_name_the_lost_one_and_end(what: str, victim: int, number: int) -> None:
    processes = start(number, what, str(victim))
    status = processes[victim].wait(120)
    end_s = time.monotonic() + MOST_S
    assert status == (1 if what == "fail" else -signal.SIGKILL)
    for i, process in enumerate(processes):
        if i == victim:
            continue
        _, errors = process.communicate(timeout=end_s - time.monotonic())
        assert process.returncode == LOST_STATUS, errors
        assert f"kvjax: process {victim} of {number} is lost: " in errors
        assert f"process {i} had its last word; process {i} ends with status {LOST_STATUS}\n" in errors
        if what == "exchange" and victim != 0:  # else the client, which aborts, answers nobody
            assert "PeerLostError: process" in errors
    processes[victim].communicate()


@pytest.mark.sweep
def test_processes_that_end_well_lose_nobody() -> None:
    for process in start(3, "end"):
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert output.endswith("ends\n")
        assert "lost" not in errors


@pytest.mark.sweep
def test_who_waits_for_one_that_has_ended_is_told() -> None:
    first, second = start(2, "leave")
    _, errors = first.communicate(timeout=120)
    assert "PeerLostError: process 1 has ended, and process 0 waits for it at 'end'" in errors
    assert first.returncode == 1
    second.communicate(timeout=120)


@pytest.mark.sweep
def test_an_abort_of_another_cause_is_what_it_was() -> None:
    first, second = start(2, "abort")
    second.communicate(timeout=120)
    assert second.returncode == -signal.SIGABRT
    first.communicate(timeout=MOST_S)
    assert first.returncode == LOST_STATUS

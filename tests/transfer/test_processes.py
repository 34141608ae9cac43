"""A prefill and a decode engine of two processes each, over other meshes and pages: tokens of one engine alone."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUM_PROCESSES = 2


class Group:
    """Processes of one engine, started here."""

    def __init__(self, role: str, name: str, axes: tuple[str, ...], key: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        num_devices = math.prod(int(axis.split("=")[1]) for axis in axes) // NUM_PROCESSES
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(num_devices),
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(NUM_PROCESSES),
            "KVJAX_TRANSFER_KEY": key,
        }
        command = [sys.executable, "-m", "tests.transfer.process_group", role, name, *axes]
        self.members = [
            subprocess.Popen(
                command,
                env=environment | {"JAX_PROCESS_ID": str(i)},
                cwd=ROOT,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for i in range(NUM_PROCESSES)
        ]

    def tell(self, command: str, members: tuple[int, ...] = (0, 1)) -> None:
        """Gives a command to some members; those that have died hear nothing."""
        for i in members:
            pipe = self.members[i].stdin
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.write(command + "\n")
                pipe.flush()

    def answers(self, word: str) -> list[str | None]:
        """What each member says behind a word; None: it has ended."""
        return [self._answer(member, word) for member in self.members]

    def _answer(self, member: subprocess.Popen[str], word: str) -> str | None:
        assert member.stdout is not None
        for line in member.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        return None

    def kill(self) -> None:
        for member in self.members:
            member.kill()
            member.communicate()


@contextlib.contextmanager
def groups(name: str, prefill: tuple[str, ...], decode: tuple[str, ...]) -> Iterator[tuple[Group, Group]]:
    key = secrets.token_hex(32)
    both = Group("prefill", name, prefill, key), Group("decode", name, decode, key)
    late = threading.Timer(240, lambda: [group.kill() for group in both])
    late.start()
    try:
        for group in both:
            assert group.answers("ready") == ["", ""]
        yield both
    finally:
        late.cancel()
        for group in both:
            group.kill()


SWEEP = pytest.mark.sweep


@pytest.mark.parametrize(
    ("name", "prefill", "decode"),
    [
        ("llama", ("tensor=2",), ("context=2", "tensor=2")),
        pytest.param("llama", ("tensor=4",), ("tensor=2",), marks=SWEEP),
        pytest.param("llama", ("data=2", "tensor=2"), ("tensor=4",), marks=SWEEP),
        pytest.param("llama", ("tensor=2", "data=2"), ("data=2",), marks=SWEEP),
        pytest.param("jamba", ("tensor=4",), ("tensor=2",), marks=SWEEP),
        pytest.param("jamba", ("tensor=2",), ("tensor=4",), marks=SWEEP),
        pytest.param("qwen3_next", ("tensor=2",), ("data=2", "tensor=2"), marks=SWEEP),
        pytest.param("deepseek_v3", ("context=2",), ("tensor=2",), marks=SWEEP),
        pytest.param("deepseek_v3", ("data=2",), ("context=2", "tensor=2"), marks=SWEEP),
        pytest.param("gemma3", ("context=2", "tensor=2"), ("data=2", "tensor=2"), marks=SWEEP),
    ],
)
def test_two_processes_decode_what_two_computed(name: str, prefill: tuple[str, ...], decode: tuple[str, ...]) -> None:
    """All prompts are loaded; a second time their tickets are void, and they are computed."""
    with groups(name, prefill, decode) as (source, target):
        source.tell("compute")
        tickets = source.answers("tickets")
        assert tickets[0] is not None
        assert tickets[0] == tickets[1]
        target.tell("expect " + tickets[0])
        target.tell("decode")
        assert target.answers("decoded") == ["0", "0"]
        target.tell("expect " + tickets[0])
        target.tell("decode")
        failed = target.answers("decoded")
        assert failed[0] == failed[1] != "0"


CALLS = (0, 1, 2, 3, 4, 6, 9, 13, 16, 18)  # of a connector, at which a process is killed; a prefill makes no 25
LIMIT_S = 10.0
COMES_TO_IT_S = 250.0  # to compile and reach the call, on a busy machine too


@pytest.mark.sweep
@pytest.mark.parametrize("member", [0, 1])
def test_decoding_outlives_a_prefill_process_that_dies_before_it_is_asked(member: int) -> None:
    """Its half of the heads is gone: every prompt is computed, and soon."""
    with groups("llama", ("tensor=2",), ("tensor=2",)) as (source, target):
        source.tell("compute")
        tickets = source.answers("tickets")[0]
        assert tickets is not None
        source.members[member].kill()
        source.members[member].wait()
        target.tell("expect " + tickets)
        target.tell("decode")
        failed = target.answers("decoded")
        assert failed[0] == failed[1] != "0"


@pytest.mark.sweep
@pytest.mark.parametrize("member", [0, 1])
@pytest.mark.parametrize("call", CALLS)
def test_a_process_that_dies_ends_its_group_and_no_other(member: int, call: int) -> None:
    """A prefill process dies while it computes: its group ends in seconds, and the other computes all prompts itself.

    Then a decode process dies in the same place: the rest of its group ends in seconds.
    """
    with groups("llama", ("tensor=2",), ("tensor=2",)) as (source, target):
        source.tell(f"die {call}", (member,))
        source.tell("compute")
        assert_ends(source, member)
        target.tell("decode")
        assert target.answers("decoded") == ["0", "0"]
        target.tell(f"die {call}", (member,))
        target.tell("decode")
        assert_ends(target, member)


def assert_ends(group: Group, member: int) -> None:
    """A member dies, and soon all others of its group have ended."""
    group.members[member].wait(COMES_TO_IT_S)
    for other in group.members:
        other.wait(LIMIT_S)
        assert other.returncode != 0

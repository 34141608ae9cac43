"""Several processes of one computation: how they join, and how they show each other what they think.

Flow:    environment -> [join_processes] -> jax.distributed; texts -> [ProcessBoard.exchange] -> those of all processes
Source:  JAX's multi-controller runtime; the board is the key-value store of its coordinator

    JAX_COORDINATOR_ADDRESS   host:port where process 0 listens
    JAX_NUM_PROCESSES         how many there are
    JAX_PROCESS_ID            which one this is

The board needs no device, so it works where a collective would wait for a process that does something else.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from typing import Any

import jax
from jax._src import distributed  # the store has no public name; orbax takes it from here too
from jax.sharding import Mesh

from kvjax.device.mesh.peers import watch_peers
from kvjax.errors import DivergenceError, PeerLostError

LOOK_MS = 500  # how often a process that waits for another looks whether it is still there
LOSS_S = 1.0  # in which a process that has ended is known to have

PROCESS_TIMEOUT_S = 600.0  # for the slowest process: one may compile while another waits
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def join_processes() -> bool:
    """Joins the processes that the environment names, before jax has started; False: it names none.

    From here on this process ends when another is lost (`PeerWatch`).

    Raises:
        ValueError: some of the variables are missing, or are no numbers.
    """
    given = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if not given:
        return False
    missing = [name for name in VARIABLES if name not in given]
    if missing:
        raise ValueError(f"expected {', '.join(VARIABLES)} in the environment, got no {', '.join(missing)}")
    address, *numbers = given.values()
    if not all(number.isdecimal() for number in numbers) or int(numbers[1]) >= int(numbers[0]):
        raise ValueError(f"expected JAX_PROCESS_ID below JAX_NUM_PROCESSES, got {numbers[1]} and {numbers[0]}")
    jax.distributed.initialize(address, num_processes=int(numbers[0]), process_id=int(numbers[1]))
    if int(numbers[0]) > 1:
        watch_peers()
    return True


def spans_processes(mesh: Mesh) -> bool:
    """Whether devices of the mesh belong to several processes."""
    return len({device.process_index for device in mesh.devices.flat}) > 1


class ProcessBoard:
    """Where all processes put texts up for each other. Owned by one thread; an exchange waits for the slowest."""

    def __init__(self, timeout_s: float = PROCESS_TIMEOUT_S) -> None:
        """A board of its own for the n-th that every process makes. An exchange waits so long for the others.

        Raises:
            ValueError: this process has joined no others.
        """
        self._watch = watch_peers()
        self._watch.arm()
        client: Any = distributed.global_state.client
        self._client = client
        self._timeout_s = timeout_s
        self.index, self.num_processes = jax.process_index(), jax.process_count()
        number = self._client.key_value_increment(f"kvjax/boards/{self.index}", 1)
        self._prefix = f"kvjax/board/{number}"
        self._posted: deque[str] = deque()  # own keys that somebody may still read

    def exchange(self, topic: str, text: str) -> list[str]:
        """The texts of all processes on a topic, by process: `post`, then `collect`.

        Raises:
            DivergenceError: a process puts nothing up on it in time.
            PeerLostError: a process is gone.
        """
        self.post(topic, text)
        return self.collect(topic)

    def post(self, topic: str, text: str) -> None:
        """Puts a text up; waits for nobody. A topic comes once, and all processes post the same topics in one order."""
        key = f"{self._prefix}/{topic}/{self.index}"
        self._client.key_value_set(key, text)
        self._posted.append(key)

    def collect(self, topic: str) -> list[str]:
        """The texts of all processes on a topic, by process, once all have posted theirs; before the next `post`.

        Raises:
            DivergenceError: a process puts nothing up on it in time.
            PeerLostError: a process is gone.
        """
        own = f"{self._prefix}/{topic}/{self.index}"
        texts = [self._read(topic, process) for process in range(self.num_processes)]
        while self._posted[0] != own:  # all have posted this topic, so they have read those before it
            self._client.key_value_delete(self._posted.popleft())
        return texts

    def check_peers(self, error: BaseException | None = None) -> None:
        """What to do about an `error` of this process first.

        Raises:
            PeerLostError: a process is gone, so no other error matters.
        """
        is_of_device = isinstance(error, jax.errors.JaxRuntimeError)  # as of a collective that breaks off
        self._watch.check(LOSS_S if is_of_device else 0.0, error)

    def tell(self, topic: str, text: str) -> None:
        """Process 0 tells the others; waits for nobody."""
        self._client.key_value_set(f"{self._prefix}/{topic}", text)

    def hear(self, topic: str) -> str:
        """What process 0 tells, whenever it does.

        Raises:
            PeerLostError: a process is gone.
        """
        return self._wait(f"{self._prefix}/{topic}", math.inf, 0, topic)

    def forget(self, topic: str) -> None:
        """Process 0 takes back what all have heard."""
        self._client.key_value_delete(f"{self._prefix}/{topic}")

    def _read(self, topic: str, process: int) -> str:
        return self._wait(f"{self._prefix}/{topic}/{process}", self._timeout_s, process, topic)

    def _wait(self, key: str, timeout_s: float, process: int, topic: str) -> str:
        end_s = time.monotonic() + timeout_s
        while True:
            left_ms = min(max((end_s - time.monotonic()) * 1000, 1.0), LOOK_MS)
            try:
                return str(self._client.blocking_key_value_get(key, int(left_ms)))
            except jax.errors.JaxRuntimeError as error:
                is_late = str(error).startswith("DEADLINE_EXCEEDED")
                self._watch.check(0.0 if is_late else LOSS_S, error)
                if not is_late:
                    raise
                if process in self._watch.ended:
                    raise PeerLostError(
                        f"process {process} has ended, and process {self.index} waits for it at {topic!r}", process
                    ) from error
                if time.monotonic() >= end_s:
                    raise DivergenceError(
                        f"process {self.index} waited {timeout_s:g} s for process {process} at {topic!r}; it "
                        "does not go on, or was given other requests"
                    ) from error


__all__ = ["ProcessBoard", "join_processes", "spans_processes"]

"""Run by tests in processes of their own: processes that join, and of which one dies while the others do something.

python -m tests.device.mesh.peers_program WHAT [VICTIM]

collective   all add over their devices, again and again; the others hang in it
exchange     the others wait on the board
compute      the others compute by themselves, and look at nothing
fail         the victim raises
end          process 1 ends well at once, the others soon after
leave        process 1 ends well, and process 0 waits for it on the board
abort        process 1 aborts by a call of its own
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.device import join_processes
from kvjax.device.mesh.peers import DOOR_KEY, HELLO, watch_peers
from kvjax.device.mesh.processes import ProcessBoard


def adder() -> tuple[jax.Array, object]:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    ones = jax.make_array_from_callback(
        (mesh.size,), NamedSharding(mesh, PartitionSpec("x")), lambda index: np.ones(mesh.size)[index]
    )
    return ones, jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))


def send_strangers() -> list[socket.socket]:
    """Connections to the door of process 0: silent, cut short, of another key, of no process, of much noise."""
    state = distributed.global_state
    assert state.client is not None
    assert state.coordinator_address is not None
    port, key = state.client.blocking_key_value_get(DOOR_KEY, 1000).split()
    place = (state.coordinator_address.split(":")[0], int(port))
    own = bytes.fromhex(key)
    said = [b"", b"\0" * 4, own, own + b"\0\0\0\0", own + b"\xff" * 4, bytes(HELLO.size), os.urandom(100_000)]
    lines = []
    for i in range(210):
        line = socket.create_connection(place)
        with suppress(OSError):
            line.sendall(said[i % len(said)])
        if i % 2:
            line.close()
        else:
            lines.append(line)
    return lines


def main() -> None:
    what, victim = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None
    join_processes()
    own = jax.process_index()
    watch_peers().before_end.append(lambda: f"process {own} had its last word")
    ones, add = adder()
    assert int(add(ones)) == ones.size  # type: ignore[operator]
    board = ProcessBoard(300.0)
    board.exchange("start", "")
    if own == victim:
        print("dies", flush=True)
        strangers = send_strangers() if what == "strangers" else []
        assert len(strangers) in (0, 105)
        if what == "fail":
            raise RuntimeError("planted")
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "abort" and own == 1:
        os.abort()
    if what == "leave" and own == 0:
        board.exchange("end", "")
    if what in ("end", "leave"):
        print("ends", flush=True)
        return
    while what == "collective":
        np.asarray(add(ones))  # type: ignore[operator]
    while what == "compute":
        sum(range(10_000))
    board.exchange("never", "")


if __name__ == "__main__":
    main()

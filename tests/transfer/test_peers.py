"""Pages sent from one process to another, over other numbers of devices; a sender that dies; tickets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import chex
import numpy as np
import pytest

from kvjax.device import Placement
from kvjax.errors import TransferError
from kvjax.transfer import (
    LayerHeader,
    PageClient,
    PageReader,
    PageServer,
    PageWriter,
    RequestPages,
    SentHeader,
    Ticket,
)
from tests.transfer.peer_processes import READY
from tests.transfer.worlds import config_of, nan_pages, specs

ROOT = Path(__file__).parents[2]


@contextmanager
def peer(role: str, num_devices: int) -> Iterator[subprocess.Popen[str]]:
    """A side of the transfer in a process of its own, killed in the end."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={num_devices}"
    command = [sys.executable, "-m", "tests.transfer.peer_processes", role]
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        command, env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line that it prints; empty if it ends before."""
    assert process.stdout is not None
    return process.stdout.readline()


def test_four_devices_send_to_two_and_die() -> None:
    """Pages of 4 tokens, K and V apart, arrive as packed ones of 8; the second pull raises, and nothing is written."""
    with peer("send", 4) as sender, peer("receive", 2) as receiver:
        assert receiver.stdin is not None
        receiver.stdin.write(line_of(sender) + line_of(sender))
        receiver.stdin.flush()
        assert line_of(receiver).strip() == READY
        sender.kill()
        sender.wait()
        receiver.communicate("the sender is dead\n")
        assert receiver.returncode == 0


def test_what_was_not_cut_for_this_client_or_never_offered_is_refused() -> None:
    config, one = config_of({"full": specs(4)["full"]}, "cpu"), Placement.create()
    request = RequestPages((np.array([1, 2], np.int32),), 0, 8)
    sent = PageReader(config, one).read(nan_pages(config), request)
    server, client, writer = PageServer(), PageClient(), PageWriter(config, one)
    with pytest.raises(
        ValueError, match="expected entries cut for 1 devices, got 2; give `offer` the receiver's number"
    ):
        client.pull(server.offer(sent, 2), writer)
    with pytest.raises(ValueError, match="expected shards that divide 4 heads, got 3"):
        server.offer(sent, 3)
    ticket = server.offer(sent, 1)
    with pytest.raises(TransferError, match="no answer in"):
        client.pull(replace(ticket, uuid=99), writer).wait(0.2)
    chex.assert_trees_all_equal(client.pull(ticket, writer).wait().arrays, sent.arrays)


def a_ticket() -> Ticket:
    layer = LayerHeader("layers.0", ((4, 8), (4, 8)), ("bfloat16", "bfloat16"), 64, 16, 2, True, (0, 2, 3))
    return Ticket("127.0.0.1:1", 3, 2, SentHeader(0, 50, "weights", (layer, layer)))


def test_a_ticket_comes_back_from_its_bytes() -> None:
    assert Ticket.from_bytes(a_ticket().to_bytes()) == a_ticket()


@pytest.mark.parametrize("data", [b"", b"\x01", b"\xa0", b"\xff\xff", a_ticket().to_bytes()[:-1]])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="expected a ticket of kvjax"):
        Ticket.from_bytes(data)

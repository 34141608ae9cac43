"""Pages sent from one process to another, over other numbers of devices; a sender that dies; tickets."""

from __future__ import annotations

import os
import subprocess
import sys
import time
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
from tests.transfer.worlds import config_of, nan_pages, specs

ROOT = Path(__file__).parents[2]


@contextmanager
def peer(role: str, folder: Path, num_devices: int) -> Iterator[subprocess.Popen[bytes]]:
    """A side of the transfer in a process of its own; what it says is in a file of its role's name."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={num_devices}"
    command = [sys.executable, "-m", "tests.transfer.peer_processes", role, str(folder)]
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    with open(folder / role, "wb") as said:
        process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=said, stderr=said)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def test_four_devices_send_to_two_and_die(tmp_path: Path) -> None:
    """Pages of 4 tokens, K and V apart, arrive as packed ones of 8; the second pull raises, and nothing is written."""
    with peer("send", tmp_path, 4) as sender, peer("receive", tmp_path, 2) as receiver:
        while not (tmp_path / "ready").exists() and receiver.poll() is None and sender.poll() is None:
            time.sleep(0.05)
        sender.kill()
        sender.wait()
        (tmp_path / "killed").touch()
        assert receiver.wait(60) == 0, (tmp_path / "receive").read_text() + (tmp_path / "send").read_text()


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

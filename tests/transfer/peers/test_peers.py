"""Pages sent from one process to another, over other numbers of devices; senders that die, offers that are gone."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvjax.core import Request
from kvjax.errors import TransferError
from kvjax.transfer import PageClient, PageServer, TransferKey
from tests.transfer.peers.one_offer import one_offer
from tests.transfer.peers.peer_processes import READY

ROOT = Path(__file__).parents[3]
TRANSFER_KEY = secrets.token_hex(32)


@contextmanager
def peer(role: str, num_devices: int) -> Iterator[subprocess.Popen[str]]:
    """A side of the transfer in a process of its own, killed in the end."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={num_devices}"
    command = [sys.executable, "-m", "tests.transfer.peers.peer_processes", role]
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "KVJAX_TRANSFER_KEY": TRANSFER_KEY}
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


def test_an_offer_is_for_one_pull_and_ids_cannot_be_guessed() -> None:
    with one_offer() as one:
        ticket = one.client.read(one.offer())
        neighbour = one.client.read(one.offer())
        one.client.pull(ticket, one.writer).wait(20)
        end_s = time.monotonic() + 20
        while one.server.num_offers > 1:  # until its release has come
            assert time.monotonic() < end_s
        (source,) = neighbour.sources
        before = (int.from_bytes(source.offer, "big") - 1).to_bytes(16, "big")
        for offer in (ticket.sources[0].offer, before):
            stale = replace(neighbour, sources=(replace(source, offer=offer),))
            with pytest.raises(TransferError, match="NOT_FOUND: the offer was taken, has expired, or never was"):
                one.client.pull(stale, one.writer).wait(20)
        one.client.pull(neighbour, one.writer).wait(20)


def test_whoever_has_another_key_gets_nothing() -> None:
    """Neither reads the ticket, nor is heard by the server, nor trusts it."""
    with one_offer() as one:
        ticket = one.offer()
        stranger = PageClient(TransferKey.generate())
        with pytest.raises(ValueError, match="expected a ticket signed with this key"):
            stranger.read(ticket)
        with pytest.raises(TransferError, match=r"tokens 0 to 11 did not arrive: 127.*UNAVAILABLE"):
            stranger.pull(one.client.read(ticket), one.writer).wait(20)
        stranger.close()
        one.assert_serves()
        assert one.server.num_offers >= 1


def test_a_server_that_is_started_again_serves_at_once() -> None:
    """Its clients connect anew, though they have seen it fail many times."""
    with one_offer() as one:
        address, ticket = one.server.address, one.client.read(one.offer())
        one.server.close()
        for _ in range(5):
            with pytest.raises(TransferError):
                one.client.pull(ticket, one.writer).wait(20)
        again = replace(one, server=PageServer(one.key, address))
        end_s = time.monotonic() + 20
        while True:
            try:
                again.assert_serves()
                break
            except TransferError:
                assert time.monotonic() < end_s
        again.server.close()


def test_a_pull_that_is_broken_off_raises_and_leaves_the_offer() -> None:
    with one_offer() as one:
        ticket = one.client.read(one.offer())
        arrival = one.client.pull(ticket, one.writer)
        arrival.cancel()
        try:
            arrival.wait(20)
        except TransferError:
            assert one.server.num_offers == 1
        one.assert_serves()


def test_ids_of_offers_are_random() -> None:
    with one_offer() as one:
        ids = [int.from_bytes(one.client.read(one.offer()).sources[0].offer, "big") for _ in range(100)]
    assert len({*ids}) == 100
    for bit in range(128):
        assert 10 < sum(number >> bit & 1 for number in ids) < 90  # 8 standard deviations


@pytest.mark.parametrize("address", ["", "here", "127.0.0.1", "127.0.0.1:x", "no-such-host.invalid:0"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"expected host:port|expected an address to listen at"):
        PageServer(TransferKey.generate(), address)


def test_a_taken_port_and_limits_that_cannot_be_are_refused() -> None:
    key = TransferKey.generate()
    with one_offer(key) as one:
        with pytest.raises(ValueError, match="expected an address to listen at"):
            PageServer(key, one.server.address)
        with pytest.raises(ValueError, match="expected positive limits, got offer_ttl_s=0"):
            PageServer(key, offer_ttl_s=0)
        with pytest.raises(ValueError, match=r"expected positive limits, got .*max_offer_bytes=-1"):
            PageServer(key, max_offer_bytes=-1)
        with pytest.raises(ValueError, match="expected positive limits, got timeout_s=-1"):
            PageClient(key, timeout_s=-1)
        with pytest.raises(ValueError, match="expected a request of at least 11 tokens, got 3"):
            one.server.offer(one.sent, Request("b", [1, 2, 3]))

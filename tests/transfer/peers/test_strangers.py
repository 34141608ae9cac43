"""Whoever connects without the key, whatever he sends: the server lives, and its peers are served."""

from __future__ import annotations

import random
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from kvjax.transfer import TransferKey
from kvjax.transfer.peers import certificates
from tests.transfer.peers.one_offer import one_offer

Address = tuple[str, int]
NUM_OPEN = 200  # sockets of a flood


def client_hello() -> bytes:
    """How TLS begins."""
    context = ssl.create_default_context()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    connection = context.wrap_bio(incoming, outgoing, server_hostname="peer.kvjax")
    with suppress(ssl.SSLWantReadError):
        connection.do_handshake()
    return outgoing.read()


HELLO = client_hello()


def messages(kind: str, rng: random.Random) -> bytes:
    """What a stranger of a kind sends."""
    if kind == "zeros":
        return b"\x00" * 4
    if kind == "random":
        return rng.randbytes(rng.randint(1, 2_000))
    if kind == "half a handshake":
        return HELLO[: rng.randrange(1, len(HELLO))]
    if kind == "huge length":
        return b"\x16\x03\x01\xff\xff\x01\xff\xff\xff" + rng.randbytes(1_000)
    if kind == "another protocol":
        others = (
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"SSH-2.0-x\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"*1\r\n$4\r\nPING\r\n",
        )
        return rng.choice(others)
    return HELLO  # then silence, or a reset


KINDS = ("zeros", "random", "half a handshake", "huge length", "another protocol", "silence", "flood", "reset")


@contextmanager
def stranger(kind: str, address: Address, rng: random.Random) -> Iterator[None]:
    """Connections of a kind; they stay open inside."""
    with ExitStack() as stack:
        for _ in range(NUM_OPEN if kind == "flood" else 1):
            connection = stack.enter_context(socket.create_connection(address, timeout=20))
            if kind == "flood":
                continue
            with suppress(ConnectionError):
                connection.sendall(messages(kind, rng))
            if kind == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        yield


def address_of(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return host, int(port)


@pytest.mark.parametrize("num_each", [10, pytest.param(1_250, marks=[pytest.mark.sweep, pytest.mark.timeout(1_800)])])
def test_garbage_of_eight_kinds_harms_nobody(num_each: int) -> None:
    """A pull while strangers of each kind are connected, and one behind them all."""
    rng = random.Random(2)
    with one_offer() as one:
        address = address_of(one.server.address)
        for kind in KINDS:
            with ExitStack() as stack:
                for i in range(num_each if kind != "flood" else max(1, num_each // 50)):
                    if i % 100 == 99:
                        stack.pop_all().close()
                    stack.enter_context(stranger(kind, address, rng))
                one.assert_serves()
        one.assert_serves()


def test_strangers_from_many_threads_while_peers_pull() -> None:
    rngs = [random.Random(seed) for seed in range(4)]
    with one_offer() as one:
        address = address_of(one.server.address)

        def harass(rng: random.Random) -> None:
            for _ in range(30):
                with stranger(rng.choice(("zeros", "random", "huge length", "reset")), address, rng):
                    pass

        threads = [threading.Thread(target=harass, args=(rng,)) for rng in rngs]
        run_beside(threads, one.assert_serves)
        one.assert_serves()


def run_beside(threads: list[threading.Thread], work: Callable[[], None]) -> None:
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        work()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("has_certificate", [False, True])
def test_whoever_proves_nothing_is_told_nothing(has_certificate: bool, tmp_path: Path) -> None:
    """He trusts anybody, and shows no certificate or one of another key: not a byte of HTTP/2 comes back."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if has_certificate:
        pem = certificates._pem(TransferKey.generate())
        (tmp_path / "pair").write_bytes(pem.certificate + pem.private_key)
        context.load_cert_chain(tmp_path / "pair")
    heard = b""
    with (
        one_offer() as one,
        suppress(ssl.SSLError, ConnectionError),
        socket.create_connection(address_of(one.server.address), timeout=20) as plain,
        context.wrap_socket(plain) as connection,
    ):
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        heard = connection.recv(1_000)
    assert heard == b""

"""The shared tier on a real redis-server: passwords, users that see one prefix, expiry, a full one, a dead one."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvjax.errors import TierDataError
from kvjax.tiers.shared.config import SharedTierConfig
from kvjax.tiers.shared.shared_store import SharedStore
from tests.tiers.shared.slow_proxy import Proxy
from tests.tiers.shared.stores import PASSWORD, UNHURRIED, Server, needs_server, new_prefix, server
from tests.tiers.shared.test_shared_store import (
    UNIT,
    ask,
    key_of,
    make,
    opened,
    pages_of,
    read,
    unit_of,
    wait_until,
    write,
)

__all__ = ["make", "opened", "server"]  # fixtures
pytestmark = needs_server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """A server that a test may harm."""
    one = Server(tmp_path)
    yield one
    one.end()


def client_of(server: Server) -> Any:
    import redis

    return redis.Redis(port=server.port, password=PASSWORD)


def test_the_laws_hold_under_the_name_of_valkey(server: Server, make: Callable[..., SharedStore]) -> None:
    store = make(SharedTierConfig(store=server.url.replace("redis:", "valkey:"), prefix=new_prefix(), **UNHURRIED))
    write(store, [1])
    np.testing.assert_array_equal(read(store, 1), unit_of(1))


def test_a_wrong_password_is_told_and_opens_nothing(
    server: Server, make: Callable[..., SharedStore], caplog: pytest.LogCaptureFixture
) -> None:
    url = f"redis://:wrong@127.0.0.1:{server.port}"
    store = make(SharedTierConfig(store=url, prefix=new_prefix(), **UNHURRIED))
    wait_until(lambda: store.reading.is_open and store.writing.is_open)
    wait_until(lambda: "invalid username-password pair" in caplog.text)
    assert "reading from the shared tier" in store.stats.shared_problem
    assert "wrong@" not in caplog.text
    assert store.may_have([key_of(1)]) == [False]


def test_a_user_of_one_prefix_reaches_no_other(server: Server, make: Callable[..., SharedStore]) -> None:
    """The server's own rules keep tenants apart: a tenant that asks under another's prefix is refused."""
    ours, theirs = new_prefix(), new_prefix()
    with client_of(server) as client:
        rules = {"enabled": True, "categories": ["+@all"], "keys": [f"{ours}/*"], "passwords": ["+tenant"]}
        client.acl_setuser("tenant", **rules)
    url = f"redis://tenant:tenant@127.0.0.1:{server.port}"
    owner = make(SharedTierConfig(store=server.url, prefix=theirs, **UNHURRIED))
    write(owner, [1])
    own = make(SharedTierConfig(store=url, prefix=ours, **UNHURRIED))
    write(own, [2])
    np.testing.assert_array_equal(read(own, 2), unit_of(2))
    thief = make(SharedTierConfig(store=url, prefix=theirs, **UNHURRIED))
    wait_until(lambda: thief.reading.is_open and thief.writing.is_open)
    assert thief.may_have([key_of(1)]) == [False]


def test_units_expire_after_their_last_use(server: Server, make: Callable[..., SharedStore]) -> None:
    store = make(SharedTierConfig(store=server.url, prefix=new_prefix(), expire_s=1_000.0, **UNHURRIED))
    write(store, [1])
    name = store._seals.name_of(key_of(1))
    with client_of(server) as client:
        assert 990 < client.ttl(name) <= 1_000
        client.expire(name, 500)
        read(store, 1)
        assert 990 < client.ttl(name) <= 1_000
        client.pexpire(name, 1)
        wait_until(lambda: not client.exists(name))
    with pytest.raises(TierDataError, match="in the shared tier no more"):
        read(store, 1)


def test_a_full_server_is_read_and_is_written_to_when_it_has_room_again(
    own_server: Server, make: Callable[..., SharedStore], caplog: pytest.LogCaptureFixture
) -> None:
    store = make(SharedTierConfig(store=own_server.url, **UNHURRIED))
    write(store, [1])
    with client_of(own_server) as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1mb")
        for number in range(2, 12):
            store.offer([key_of(number)], pages_of([number]))
            store.flush()
        wait_until(lambda: store.writing.is_open)
        wait_until(lambda: "writing to the shared tier" in caplog.text)
        assert "used memory > 'maxmemory'" in caplog.text
        np.testing.assert_array_equal(read(store, 1), unit_of(1))
        client.config_set("maxmemory", "0")
    wait_until(lambda: not store.writing.is_open)
    write(store, [20])
    np.testing.assert_array_equal(read(store, 20), unit_of(20))


def test_a_server_that_evicts_loses_units_and_no_more(own_server: Server, make: Callable[..., SharedStore]) -> None:
    store = make(SharedTierConfig(store=own_server.url, **UNHURRIED))
    with client_of(own_server) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + 100 * UNIT)
        for first in range(0, 400, 20):
            write(store, list(range(first, first + 20)))
    assert store.stats.num_shared_writes == 400
    num_read = 0
    for number in range(400):
        try:
            np.testing.assert_array_equal(read(store, number), unit_of(number))
            num_read += 1
        except TierDataError:
            pass
    assert 0 < num_read < 400
    assert not store.writing.is_open


def test_a_killed_server_costs_its_units_and_comes_back(tmp_path: Path, make: Callable[..., SharedStore]) -> None:
    first = Server(tmp_path)
    store = make(SharedTierConfig(store=first.url, **UNHURRIED))
    write(store, [1])
    first.end()
    for number in range(100, 110):
        if not store.reading.is_open:
            assert ask(store, [key_of(number)]) == [False]
    assert store.reading.is_open
    with pytest.raises(TierDataError, match="does not work at present"):
        read(store, 1)
    again = Server(tmp_path, port=first.port)
    wait_until(lambda: not store.reading.is_open)
    wait_until(lambda: not store.writing.is_open)
    write(store, [2])
    np.testing.assert_array_equal(read(store, 2), unit_of(2))
    with pytest.raises(TierDataError, match="in the shared tier no more"):
        read(store, 1)
    again.end()


@pytest.mark.parametrize("mode", ["hold", "drip", "cut"])
def test_every_call_ends_in_time(server: Server, make: Callable[..., SharedStore], mode: str) -> None:
    """A server that answers nothing, a byte at a time, or half: deadlines are of whole calls, not of each wait."""
    proxy = Proxy(server.port)
    url = f"redis://:{PASSWORD.replace(' ', '%20')}@127.0.0.1:{proxy.port}"
    settings = {"timeout_s": 0.5, "lookup_timeout_s": 0.2, "retry_s": 0.1}
    store = make(SharedTierConfig(store=url, prefix=new_prefix(), **settings))
    wait_until(lambda: store.stats.num_shared_failures == 0 and not store.reading.is_open)
    write_until_there(store, 1)
    proxy.mode = mode
    start = time.monotonic()
    with pytest.raises(TierDataError, match=r"gave no units|does not work"):
        read(store, 1)
    store.offer([key_of(2)], pages_of([2]))
    store.flush()
    assert time.monotonic() - start < 30.0, "two calls of half a second; a drop every 5 ms would take 20 s for one"
    for number in range(100, 110):
        ask(store, [key_of(number)])
    assert store.reading.is_open
    proxy.mode = "pass"
    wait_until(lambda: not store.reading.is_open)
    np.testing.assert_array_equal(read_until_there(store, 1), unit_of(1))
    proxy.close()


def write_until_there(store: SharedStore, number: int) -> None:
    """On a machine that is too busy for short deadlines now and then."""
    wait_until(lambda: store.offer([key_of(number)], pages_of([number])) and not store.flush() and is_there(store))


def is_there(store: SharedStore) -> bool:
    return store.stats.num_shared_writes > 0


def read_until_there(store: SharedStore, number: int) -> np.ndarray:
    found: list[np.ndarray] = []

    def tries() -> bool:
        try:
            found.append(read(store, number))
        except TierDataError:
            return False
        return True

    wait_until(tries)
    return found[0]


def test_an_address_where_nobody_listens_is_told_at_once(
    make: Callable[..., SharedStore], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        store = make(SharedTierConfig(store=f"redis://127.0.0.1:{one.getsockname()[1]}", **UNHURRIED))
        wait_until(lambda: store.reading.is_open and store.writing.is_open)
        wait_until(lambda: "is left alone" in caplog.text)
        assert not store.offer([key_of(1)], pages_of([1]))


def test_many_threads_read_and_write_at_once(server: Server, make: Callable[..., SharedStore]) -> None:
    stores = [make(SharedTierConfig(store=server.url, prefix="test/many", **UNHURRIED)) for _ in range(2)]
    problems: list[BaseException] = []

    def work(store: SharedStore, first: int) -> None:
        try:
            for number in range(first, first + 40):
                write(store, [number])
                np.testing.assert_array_equal(read(store, number), unit_of(number))
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(stores[i % 2], 20 * i)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert sum(store.stats.num_shared_failures for store in stores) == 0

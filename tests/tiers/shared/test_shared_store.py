"""One suite of laws for every backend: what one engine writes others read, and nothing that was not written."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvjax.core import BlockHash
from kvjax.errors import TierDataError
from kvjax.tiers.shared.config import SharedTierConfig
from kvjax.tiers.shared.shared_store import SharedStore
from kvjax.tiers.units import UnitKey
from tests.damage import flipped
from tests.tiers.shared.stores import KINDS, UNHURRIED, LyingBackend, config, memory_store, new_prefix, server

__all__ = ["config", "server"]  # fixtures
IDENTITY = {"layout": "a", "weights": "m"}
SIZES = (3_000, 1_000)  # bytes of the pages of a unit
UNIT = sum(SIZES)
SECRET = "correct horse battery staple"


def key_of(number: int, group_id: int = 0) -> UnitKey:
    return UnitKey(group_id, BlockHash(number.to_bytes(32, "big")))


def unit_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, UNIT, dtype=np.uint8)


def pages_of(numbers: list[int]) -> list[np.ndarray]:
    units = np.stack([unit_of(number) for number in numbers])
    return [units[:, : SIZES[0]], units[:, SIZES[0] :]]


@pytest.fixture
def opened() -> Iterator[list[SharedStore]]:
    stores: list[SharedStore] = []
    yield stores
    for store in stores:
        store.close()


@pytest.fixture
def make(opened: list[SharedStore]) -> Callable[..., SharedStore]:
    def make_store(config: SharedTierConfig, identity: dict[str, str] = IDENTITY) -> SharedStore:
        opened.append(SharedStore(config, identity))
        return opened[-1]

    return make_store


def write(store: SharedStore, numbers: list[int]) -> None:
    assert store.offer([key_of(number) for number in numbers], pages_of(numbers))
    store.flush()


def ask(store: SharedStore, keys: list[UnitKey]) -> list[bool]:
    """What the store says once it has answered."""
    for _ in range(10_000):
        store.may_have(keys)
        if not store.is_asked(keys):
            return store.may_have(keys)
        for lookup in store.lookups:
            lookup.exception(60.0)
    raise AssertionError("no answer")


def read(store: SharedStore, number: int) -> np.ndarray:
    (unit,) = store.read([key_of(number)], UNIT)
    return unit


def wait_until(holds: Callable[[], bool]) -> None:
    """For what other threads bring about by themselves."""
    event = threading.Event()
    for _ in range(6_000):
        if holds():
            return
        event.wait(0.01)
    raise AssertionError("it never came about")


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("kind", KINDS)
def test_what_one_writes_the_other_reads(
    config: SharedTierConfig, make: Callable[..., SharedStore], secret: str | None
) -> None:
    config = replace(config, secret=secret)
    first, second = make(config), make(config)
    keys = [key_of(number) for number in range(20)]
    assert ask(second, keys) == [False] * 20
    write(first, list(range(20)))
    assert first.stats.num_shared_writes == 20
    third = make(config)
    assert ask(third, [*keys, key_of(20), key_of(1, group_id=1)]) == [True] * 20 + [False, False]
    for number, unit in enumerate(third.read(keys, UNIT)):
        np.testing.assert_array_equal(unit, unit_of(number))
    assert third.stats.num_shared_reads == 20
    write(third, list(range(15, 25)))
    assert third.stats.num_shared_writes == 5, "the store has the others"
    assert first.stats.num_shared_failures == third.stats.num_shared_failures == 0


@pytest.mark.parametrize("kind", KINDS)
def test_units_of_another_cache_prefix_or_secret_are_never_found(
    config: SharedTierConfig, make: Callable[..., SharedStore]
) -> None:
    write(make(config), [1])
    write(make(replace(config, secret=SECRET)), [2])
    others = [
        (config, {**IDENTITY, "weights": "n"}),
        (config, {**IDENTITY, "layout": "b"}),
        (config, {"layout": "a"}),
        (replace(config, prefix=new_prefix()), IDENTITY),
        (replace(config, secret=SECRET + "!"), IDENTITY),
    ]
    for other, identity in others:
        store = make(other, identity)
        assert ask(store, [key_of(1), key_of(2)]) == [False, False]
        with pytest.raises(TierDataError, match="1 of 1 units are in the shared tier no more"):
            read(store, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_unit_that_the_store_has_dropped_is_a_miss(
    config: SharedTierConfig, make: Callable[..., SharedStore]
) -> None:
    store = make(config)
    write(store, [1, 2])
    assert ask(store, [key_of(1), key_of(2)]) == [True, True]
    store._loop.run(30.0, store._backend.delete, [store._seals.name_of(key_of(1))])
    with pytest.raises(TierDataError, match="1 of 2 units are in the shared tier no more"):
        store.read([key_of(1), key_of(2)], UNIT)
    assert store.may_have([key_of(1), key_of(2)]) == [False, True]
    write(store, [1])
    np.testing.assert_array_equal(read(store, 1), unit_of(1))


LIES: dict[str, Callable[[str, Any], Any]] = {
    **{f"bit {place}": lambda _, value, place=place: flipped(value, place) for place in (0, 9, 20, 31, 40, 200, -1)},
    **{f"first {n}": lambda _, value, n=n: bytes(value)[:n] for n in (0, 10, 32, 500, UNIT)},
    "longer": lambda _, value: bytes(value) + b"\0",
    "zeros": lambda _, value: bytes(len(bytes(value))),
    "no bytes": lambda _, value: 17,
}


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_a_miss_and_is_written_anew(
    make: Callable[..., SharedStore], name: str, secret: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    backend = lying_backend()
    store = make(SharedTierConfig(store=backend, secret=secret, **UNHURRIED))
    write(store, [1, 2])
    backend.lie = LIES[name]
    with pytest.raises(TierDataError, match="expected"):
        store.read([key_of(1), key_of(2)], UNIT)
    assert store.stats.num_shared_errors == 2
    assert "has damaged units, 1 so far" in caplog.text
    backend.lie = None
    assert store.may_have([key_of(1)]) == [False]
    wait_until(lambda: not any(store._loop.run(30.0, backend.have, [store._seals.name_of(key_of(1))])))
    write(store, [1, 2])
    np.testing.assert_array_equal(read(store, 1), unit_of(1))


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_value_under_another_name_is_a_miss(make: Callable[..., SharedStore], secret: str | None) -> None:
    """So is a unit of another salt, whose hash differs, and one of another group or cache."""
    backend = lying_backend()
    config = SharedTierConfig(store=backend, secret=secret, **UNHURRIED)
    store, other = make(config), make(config, {**IDENTITY, "weights": "n"})
    write(store, [1, 2])
    write(other, [1])
    names = [store._seals.name_of(key_of(2)), other._seals.name_of(key_of(1))]
    for name in names:
        (value,) = store._loop.run(30.0, backend.get, [name])
        backend.lie = lambda _, __, value=value: value
        with pytest.raises(TierDataError, match="expected the unit that was written"):
            read(store, 1)
        backend.lie = None
        write(store, [1])


def test_whoever_lacks_the_salt_has_no_key(make: Callable[..., SharedStore]) -> None:
    """Hashes of two salts differ, so the same bytes have other names and keys, and neither name tells the hash."""
    backend = lying_backend()
    store = make(SharedTierConfig(store=backend, secret=SECRET, **UNHURRIED))
    pages = pages_of([1])
    for number in (1, 2):
        store.offer([key_of(number)], pages)
    store.flush()
    names = [store._seals.name_of(key_of(number)) for number in (1, 2)]
    assert names[0] != names[1]
    for number, name in zip((1, 2), names, strict=True):
        assert bytes(key_of(number).block_hash).hex() not in name
        (value,) = store._loop.run(30.0, backend.get, [name])
        assert pages[0][0].tobytes()[:64] not in bytes(value)
        with pytest.raises(TierDataError, match="were not sealed for it"):
            store._seals.open(key_of(3 - number), value, UNIT)


def lying_backend() -> LyingBackend:
    from kvjax.tiers.shared.object_backend import ObjectBackend

    return LyingBackend(ObjectBackend(memory_store()))


@pytest.mark.parametrize("problem", [OSError("gone"), RuntimeError("what\n\nDebug source: ...")])
def test_a_store_that_fails_is_left_alone_says_so_once_and_comes_back(
    make: Callable[..., SharedStore], problem: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    backend = lying_backend()
    store = make(SharedTierConfig(store=backend, **UNHURRIED))
    write(store, [1])
    backend.problem = problem
    for number in range(2, 8):
        assert ask(store, [key_of(number)]) == [False]
    assert store.reading.is_open
    num_calls = backend.num_calls
    for number in range(8, 1_000):
        assert store.may_have([key_of(number)]) == [False]
    with pytest.raises(TierDataError, match="does not work at present"):
        read(store, 1)
    assert backend.num_calls - num_calls < 500, "nobody but probes has called"

    def told() -> list[int]:
        return [one.levelno for one in caplog.records if re.match("reading .* is left alone", one.getMessage())]

    wait_until(lambda: bool(told()))
    assert "Debug source" not in caplog.text
    assert "Debug source" not in store.stats.shared_problem
    assert told() == [logging.ERROR]
    backend.problem = None
    wait_until(lambda: not store.reading.is_open)
    wait_until(lambda: "works again, after" in caplog.text)
    np.testing.assert_array_equal(read(store, 1), unit_of(1))


def test_a_full_store_is_written_to_no_more_and_read_all_the_same(
    make: Callable[..., SharedStore], caplog: pytest.LogCaptureFixture
) -> None:
    backend = lying_backend()
    store = make(SharedTierConfig(store=backend, **UNHURRIED))
    write(store, [1])
    backend.refuses_writes = OSError("full")
    for number in range(2, 6):
        store.offer([key_of(number)], pages_of([number]))
        store.flush()
    assert store.writing.is_open
    assert not store.offer([key_of(9)], pages_of([9]))
    assert store.stats.num_shared_skips == 5
    wait_until(lambda: "writing to the shared tier" in caplog.text)
    assert not store.reading.is_open
    np.testing.assert_array_equal(read(store, 1), unit_of(1))
    backend.refuses_writes = None
    wait_until(lambda: not store.writing.is_open)
    write(store, [2])
    np.testing.assert_array_equal(read(store, 2), unit_of(2))


def test_no_call_outlives_its_deadline(make: Callable[..., SharedStore]) -> None:
    """A store that takes calls and never answers: lookups count as absent in time, reads and writes end."""
    backend = lying_backend()
    quick = {"timeout_s": 0.2, "lookup_timeout_s": 0.05, "retry_s": 30.0}
    store = make(SharedTierConfig(store=backend, **quick))
    wait_until(lambda: backend.num_calls >= 2)
    backend.hangs = True
    assert store.may_have([key_of(1)]) == [True]
    assert store.is_asked([key_of(1)])
    wait_until(lambda: not store.is_asked([key_of(1)]))
    assert store.may_have([key_of(1)]) == [False]
    with pytest.raises(TierDataError, match="gave no units"):
        read(store, 1)
    for number in range(10):
        store.offer([key_of(number)], pages_of([number]))
    store.flush()
    assert store.writing.is_open
    assert store.stats.num_shared_writes == 0


def test_a_late_answer_is_a_failure_and_tells_all_the_same(make: Callable[..., SharedStore]) -> None:
    backend = lying_backend()
    store = make(SharedTierConfig(store=backend, timeout_s=30.0, lookup_timeout_s=0.02, retry_s=30.0))
    write(store, [1])
    store._presence = type(store._presence)(0.02)
    have = backend.under.have

    async def late(names: list[str]) -> list[bool]:
        await asyncio.sleep(0.1)
        return list(await have(names))

    backend.under.have = late
    store.may_have([key_of(1)])
    (lookup,) = store.lookups
    wait_until(lambda: not store.is_asked([key_of(1)]))
    lookup.result(60.0)
    wait_until(lambda: store.stats.num_shared_failures == 1)
    assert store._presence.of([key_of(1)])[0].value == "there"


def test_a_full_queue_sends_nothing_more(make: Callable[..., SharedStore]) -> None:
    backend = lying_backend()
    gate = threading.Event()
    put = backend.under.put

    async def slow(items: Any) -> None:
        while not gate.is_set():
            await asyncio.sleep(0.001)
        await put(items)

    backend.under.put = slow
    store = make(SharedTierConfig(store=backend, max_bytes_in_flight=2 * UNIT, **UNHURRIED))
    taken = [store.offer([key_of(number)], pages_of([number])) for number in range(5)]
    assert taken == [True, True, False, False, False]
    assert store.stats.num_shared_skips == 3
    gate.set()
    store.flush()
    write(store, [7])
    np.testing.assert_array_equal(read(store, 1), unit_of(1))


def test_lookups_go_together_and_are_not_repeated(make: Callable[..., SharedStore]) -> None:
    backend = lying_backend()
    store = make(SharedTierConfig(store=backend, **UNHURRIED))
    wait_until(lambda: backend.num_calls >= 2)
    num_calls = backend.num_calls
    keys = [key_of(number) for number in range(500)]
    for _ in range(3):
        assert ask(store, keys) == [False] * 500
    assert backend.num_calls - num_calls == 1


def test_weights_that_change_leave_their_units_behind(make: Callable[..., SharedStore]) -> None:
    store = make(SharedTierConfig(store=memory_store(), **UNHURRIED))
    write(store, [1])
    store.use_weights("digest of others")
    assert ask(store, [key_of(1)]) == [False]
    write(store, [2])
    assert ask(store, [key_of(2)]) == [True]
    store.use_weights("digest of yet others")
    assert ask(store, [key_of(1), key_of(2)]) == [False, False]


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_store_that_nobody_holds_ends_its_thread(is_closed: bool) -> None:
    store = SharedStore(SharedTierConfig(store=memory_store(), **UNHURRIED), IDENTITY)
    thread = store._loop._thread
    if is_closed:
        store.close()
    del store
    wait_until(lambda: bool(gc.collect()) or not thread.is_alive())
    thread.join(30.0)
    assert not thread.is_alive()


@pytest.mark.parametrize("seconds", [0, -1.0])
def test_bad_settings(seconds: float) -> None:
    for name in ("timeout_s", "lookup_timeout_s", "retry_s", "expire_s", "num_threads", "max_bytes_in_flight"):
        with pytest.raises(ValueError, match=f"expected {name} > 0, got {seconds}"):
            SharedTierConfig(store="memory:///", **{name: seconds})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefix": ""}, "expected a prefix of letters"),
        ({"prefix": "a/../b"}, "expected a prefix of letters"),
        ({"prefix": "/a"}, "expected a prefix of letters"),
        ({"prefix": "a*"}, "expected a prefix of letters"),
        ({"secret": "short"}, "expected a secret of 16 bytes or more, got 5"),
        ({"secret": b""}, "expected a secret of 16 bytes or more, got 0"),
        ({"store": "nowhere"}, "expected an address, such as"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SharedTierConfig(**{"store": "memory:///", **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"store": "foo://x"}, "expected the address of a store that obstore opens, got 'foo://x'"),
        ({"store": "memory:///", "expire_s": 1.0}, "expected expire_s with a store of Redis alone"),
        ({"store": object()}, "expected an address, a store of obstore or a Backend, got object"),
    ],
)
def test_stores_that_nobody_opens(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SharedStore(SharedTierConfig(**settings), IDENTITY)


def test_an_address_is_told_without_its_password() -> None:
    config = SharedTierConfig(store="redis://me:secret@host:1/0?password=secret")
    assert config.place == "redis://host:1/0"
    assert "secret" not in repr(config)


def test_files_are_their_owners_alone(make: Callable[..., SharedStore], tmp_path: Any) -> None:
    store = make(SharedTierConfig(store=(tmp_path / "units").as_uri(), **UNHURRIED))
    write(store, [1, 2])
    assert (tmp_path / "units").stat().st_mode & 0o777 == 0o700
    files = [path for path in (tmp_path / "units").rglob("*") if path.is_file() and path.stat().st_size > UNIT]
    assert len(files) == 2  # beside a probe, which may be on its way
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_deadlines_hold_where_the_loop_itself_hangs(make: Callable[..., SharedStore]) -> None:
    """A backend that blocks its thread costs `timeout_s` and a second, and no more."""
    backend = lying_backend()
    gate = threading.Event()

    async def block(names: list[str]) -> list[Any]:
        gate.wait(60.0)
        return [None] * len(names)

    store = make(SharedTierConfig(store=backend, timeout_s=0.1, lookup_timeout_s=0.05, retry_s=30.0))
    backend.under.get = block
    start = time.monotonic()
    with pytest.raises(TierDataError, match=r"no answer within 0\.1 s"):
        read(store, 1)
    assert time.monotonic() - start < 50.0
    gate.set()

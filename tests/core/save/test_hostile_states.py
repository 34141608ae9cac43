"""States that nobody vouches for: one clear error, in little memory and time, whatever was changed in them."""

from __future__ import annotations

import functools
import random
import time
import tracemalloc
import zlib
from hashlib import sha256
from typing import Any

import cbor2
import numpy as np
import pytest

from kvjax.core import BlockHasher, KVCacheManager, Request
from kvjax.core.save import bounded_cbor
from tests.core.save.test_manager_state import FULL, HYBRID
from tests.damage import damaged
from tests.plain_trees import places_of

MOST_BYTES = 32 << 20
VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 7, 255, 2**31, 10**9, 2**40, 2**63, -(2**63), 2**70, 0.5, float("nan"), 1e300),
    *(
        "",
        "a",
        "list",
        b"",
        b"abc",
        bytes(64),
        [],
        [0],
        [1],
        [10**9],
        [-1],
        [None],
        ["a"],
        {},
        {"a": 1},
        {"class": "list"},
    ),
    *("f8", "O", "V1", "(1000000000,)f4", "KVCacheConfig", [10**9, 10**9], [[0]], [[]] * 9),
)


@pytest.fixture(autouse=True)
def check_invariants_of_everything_made() -> None:
    """Not here: what a refused state was half filled into is thrown away. What is restored is checked."""


@functools.cache
def state_of(name: str) -> bytes:
    setup = {"full": FULL, "hybrid": HYBRID}[name]
    manager = setup.manager([30])
    manager.allocate_slots(Request("r", list(range(9)), block_hasher=BlockHasher(2, seed="0"), cache_salt="s"), 9)
    return manager.save_state()


def sealed(body: bytes) -> bytes:
    """A state with a body of a forger's choice."""
    packed = zlib.compress(body)
    parts = {"format": "kvjax-manager-state", "version": 3, "digest": sha256(packed).digest(), "body": packed}
    return cbor2.dumps(parts)


def assert_is_refused_or_sound(state: bytes) -> bool:
    """Whether it is refused; little memory and time either way."""
    start_s = time.monotonic()
    tracemalloc.start()
    try:
        KVCacheManager.restore(state).check_invariants()
    except ValueError as error:
        assert len(str(error)) < 2_000  # noqa: PT017
        return True
    finally:
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
        tracemalloc.stop()
        assert time.monotonic() - start_s < 20.0
    return False


@pytest.mark.parametrize("seed", range(4))
def test_bytes_that_were_changed(seed: int) -> None:
    """1,000 damaged states, none of which is restored."""
    rng = random.Random(seed)
    state = state_of(("full", "hybrid")[seed % 2])
    for _ in range(250):
        data = damaged(state, rng)
        if data != state:
            assert assert_is_refused_or_sound(data)


@pytest.mark.parametrize("seed", range(8))
def test_values_that_were_changed_and_sealed_again(seed: int) -> None:
    """1,000 forged states: of another type, huge, negative, missing or twice; nothing but a ValueError comes out."""
    rng = np.random.default_rng(seed)
    body = zlib.decompress(cbor2.loads(state_of(("full", "hybrid")[seed % 2]))["body"])
    num_refused = 0
    for _ in range(125):
        plain = cbor2.loads(body)
        head = seed % 4 == 0  # config and options have few of the places
        places = places_of({name: plain[name] for name in ("config", "options")} if head else plain)
        container, key = places[rng.integers(len(places))]
        value = VALUES[rng.integers(len(VALUES))]
        match rng.integers(6):
            case 0:
                del container[key]
            case 1 if isinstance(container, list):
                container.insert(key, container[key])
            case 2 if isinstance(container[key], bytes | str):
                container[key] = container[key][: len(container[key]) // 2]
            case _:
                container[key] = value
        num_refused += assert_is_refused_or_sound(sealed(cbor2.dumps(plain)))
    assert num_refused > 50


def bomb(kind: str) -> bytes:
    if kind == "zeros":
        return bytes(1 << 28)
    if kind == "lists":
        return b"\x9b" + (1 << 26).to_bytes(8, "big") + b"\x80" * (1 << 26)
    if kind == "maps":
        return b"\x9b" + (1 << 26).to_bytes(8, "big") + b"\xa0" * (1 << 26)
    if kind == "deep":
        return b"\x81" * (1 << 26) + b"\x00"
    if kind == "endless":
        return b"\x9f" + b"\x80" * (1 << 26) + b"\xff"
    return b"\xd8\x23\x61a"  # a regular expression


@pytest.mark.parametrize("kind", ["zeros", "lists", "maps", "deep", "endless", "tag"])
@pytest.mark.parametrize("is_sealed", [True, False])
def test_bombs_are_refused_before_they_burst(kind: str, is_sealed: bool) -> None:
    """A few hundred kilobytes that would be gigabytes of objects."""
    state = sealed(bomb(kind)) if is_sealed else bomb(kind)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="expected"):
            KVCacheManager.restore(state, max_bytes=MOST_BYTES)
        assert tracemalloc.get_traced_memory()[1] < 3 * MOST_BYTES  # zlib's buffer grows by doubling
    finally:
        tracemalloc.stop()


def test_the_limit_is_the_callers() -> None:
    state = state_of("full")
    with pytest.raises(ValueError, match="raise max_bytes if you trust it"):
        KVCacheManager.restore(state, max_bytes=10_000)
    KVCacheManager.restore(state, max_bytes=1 << 22)


@pytest.mark.parametrize("seed", range(200))
def test_items_are_counted_as_they_are_read(seed: int) -> None:
    """The oracle counts the parts of what cbor2 reads."""

    def count(value: Any) -> int:
        if isinstance(value, dict):
            return 1 + sum(count(key) + count(part) for key, part in value.items())
        if isinstance(value, list):
            return 1 + sum(map(count, value))
        return 2 if isinstance(value, int) and not -(2**64) <= value < 2**64 else 1  # a tag, and bytes

    def some(depth: int) -> Any:
        kind = rng.integers(4 if depth else 2)
        if kind == 2:
            return [some(depth - 1) for _ in range(rng.integers(30))]
        if kind == 3:
            return {str(i): some(depth - 1) for i in range(rng.integers(30))}
        length = int(rng.choice([0, 1, 23, 24, 255, 256, 65_535, 65_536]))
        sizes = [None, True, 0.5, "a" * length, bytes(length)]
        return [*sizes, *(2**i for i in (4, 5, 8, 16, 32, 63, 64, 70)), *(-(2**i) for i in (4, 8, 32, 64, 70))][
            rng.integers(18)
        ]

    rng = np.random.default_rng(seed)
    value = some(3)
    data = cbor2.dumps(value)
    assert bounded_cbor.count_items(data, 1 << 30) == count(value)
    assert bounded_cbor.load_plain(data, 1 << 30) == value
    with pytest.raises(ValueError, match=r"got an end after|got one of"):
        bounded_cbor.count_items(data[:-1], 1 << 30)

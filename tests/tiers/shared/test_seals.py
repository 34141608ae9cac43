"""Whatever becomes of a value in a store: it opens as what was written, under its own name, or not at all."""

from __future__ import annotations

import hashlib
import hmac
import random

import numpy as np
import pytest

from kvjax.core import BlockHash
from kvjax.errors import TierDataError
from kvjax.tiers.shared.encrypted_seals import EncryptedSeals
from kvjax.tiers.shared.seals import PlainSeals, Seals
from kvjax.tiers.units import UnitKey
from tests.damage import damaged

IDENTITY = {"layout": "a", "weights": "m"}
SECRET = b"correct horse battery staple"
UNIT = 600
SEALS: dict[str, Seals] = {
    "plain": PlainSeals("kvjax", IDENTITY),
    "encrypted": EncryptedSeals("kvjax", IDENTITY, SECRET),
}


def key_of(number: int, group_id: int = 0) -> UnitKey:
    return UnitKey(group_id, BlockHash(hashlib.sha256(str(number).encode()).digest()))


def lie(value: bytes, other: bytes, rng: random.Random) -> bytes:
    """Damage, or a mixture of two values."""
    place = rng.randrange(len(value))
    return rng.choices((damaged(value, rng), value[:place] + other[place:], value + value, other), (4, 1, 1, 1))[0]


@pytest.mark.parametrize("name", SEALS)
def test_ten_thousand_lies_open_nothing(name: str) -> None:
    seals, rng = SEALS[name], random.Random(0)
    units = [np.frombuffer(rng.randbytes(UNIT), np.uint8) for _ in range(2)]
    values = [bytes(seals.close(key_of(number), [unit[:200], unit[200:]])) for number, unit in enumerate(units)]
    np.testing.assert_array_equal(seals.open(key_of(0), values[0], UNIT), units[0])
    num_opened = 0
    for _ in range(10_000):
        told = lie(values[0], values[1], rng)
        if told == values[0]:
            continue
        try:
            seals.open(key_of(0), told, UNIT)
            num_opened += 1
        except TierDataError:
            pass
    assert num_opened == 0


@pytest.mark.parametrize("name", SEALS)
def test_a_value_opens_under_its_own_key_and_length_alone(name: str) -> None:
    seals = SEALS[name]
    value = seals.close(key_of(0), [np.arange(UNIT, dtype=np.uint8)])
    for key, num_bytes in ((key_of(1), UNIT), (key_of(0, group_id=1), UNIT), (key_of(0), UNIT - 1)):
        with pytest.raises(TierDataError, match="expected"):
            seals.open(key, value, num_bytes)
    assert seals.open(key_of(0), value, UNIT).size == UNIT


@pytest.mark.parametrize("of", ["plain", "encrypted"])
def test_names_differ_by_everything_that_units_depend_on(of: str) -> None:
    def name(prefix: str, identity: dict[str, str], secret: bytes, key: UnitKey) -> str:
        seals = EncryptedSeals(prefix, identity, secret) if of == "encrypted" else PlainSeals(prefix, identity)
        return seals.name_of(key)

    base = name("a", IDENTITY, SECRET, key_of(0))
    others = [
        name("b", IDENTITY, SECRET, key_of(0)),
        name("a", {**IDENTITY, "weights": "n"}, SECRET, key_of(0)),
        name("a", {**IDENTITY, "more": ""}, SECRET, key_of(0)),
        name("a", IDENTITY, SECRET, key_of(1)),
        name("a", IDENTITY, SECRET, key_of(0, group_id=1)),
    ]
    others += [name("a", IDENTITY, SECRET + b"!", key_of(0))] if of == "encrypted" else []
    assert len({base, *others}) == 1 + len(others)
    assert base == name("a", dict(reversed(IDENTITY.items())), SECRET, key_of(0)), "order says nothing"


def test_keys_are_those_of_the_published_derivation() -> None:
    """RFC 5869 by hand: one block of HKDF-Expand over HKDF-Extract, both with SHA-256."""
    identity = b'[["layout", "a"], ["weights", "m"]]'
    root = hmac.digest(b"kvjax shared tier 1" + hashlib.sha256(identity).digest(), SECRET, "sha256")

    def expand(info: bytes) -> bytes:
        return hmac.digest(root, info + b"\1", "sha256")

    text = (3).to_bytes(8, "little") + bytes(key_of(0).block_hash)
    folder = expand(b"folder").hex()[:32]
    assert SEALS["encrypted"].name_of(key_of(0, 3)) == f"kvjax/{folder}/{expand(b'name' + text).hex()}"


def test_the_same_bytes_are_never_sealed_alike() -> None:
    """Nonces are random: equal values would tell that two replicas computed the same."""
    unit = np.zeros(UNIT, np.uint8)
    assert len({bytes(SEALS["encrypted"].close(key_of(0), [unit])) for _ in range(50)}) == 50

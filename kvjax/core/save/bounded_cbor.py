"""Plain data from bytes that nobody vouches for: what it takes in memory is known before it is built.

Flow:    bytes -> [inflate] -> bytes -> [load_plain] -> None, bools, numbers, text, bytes, lists, dicts
Source:  RFC 8949, section 3: the head of an item is its major type (3 bits) and an argument

A million small lists are a megabyte of CBOR and ninety of Python objects, and zlib packs them a thousandfold. So bytes
are unpacked up to a limit, and items are counted by their heads, 0.2 us each, before any of them is made.
"""

from __future__ import annotations

import zlib
from typing import Any

import cbor2

ITEM_BYTES = 100  # most that an item takes as a Python object, with its place in a container, beside its own bytes
MAX_DEPTH = 100  # of items in items
BIGNUM_TAGS = (2, 3)
SHORT_ARGUMENTS, LONGEST_ARGUMENT = 24, 27  # below the first an argument is in the head, then in 1 to 8 bytes behind
BYTES, TEXT, ARRAY, MAP, TAG = 2, 3, 4, 5, 6  # major types


def inflate(packed: bytes, max_bytes: int) -> bytes:
    """What zlib packed.

    Raises:
        ValueError: it is no zlib stream, or more than `max_bytes`.
    """
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(packed, max_bytes)
    except zlib.error as error:
        raise ValueError(f"expected a zlib stream, got another: {error}") from error
    if unpacker.unconsumed_tail or (not unpacker.eof and len(data) >= max_bytes):
        raise ValueError(f"expected at most {max_bytes} bytes once unpacked, got more; raise max_bytes if you trust it")
    if not unpacker.eof:
        raise ValueError("expected a whole zlib stream, got a part of one")
    return data


def load_plain(data: bytes, max_bytes: int) -> Any:
    """The one item that `data` is, in at most `max_bytes` of memory.

    Raises:
        ValueError: it is no CBOR, has tags other than those of large integers or lengths that are not told, is nested
            too deep, or takes more memory.
    """
    num_items = count_items(data, max(max_bytes - len(data), 0) // ITEM_BYTES)
    if len(data) + num_items * ITEM_BYTES > max_bytes:
        raise ValueError(
            f"expected data of at most {max_bytes} bytes of memory, got more; raise max_bytes if you trust it"
        )
    try:
        return cbor2.loads(data)
    except Exception as error:  # text that is no UTF-8, keys that cannot be hashed
        raise ValueError(f"expected CBOR of plain data, got another: {error!r}") from error


def count_items(data: bytes, most: int) -> int:
    """Items of the one item that `data` is, itself among them; just above `most` if there are more.

    Raises:
        ValueError: as `load_plain`.
    """
    place, num_items, left = 0, 0, 1
    others: list[int] = []  # items to come of each container around
    while left or others:
        if not left:
            left = others.pop()
            continue
        left -= 1
        num_items += 1
        if place >= len(data):
            raise ValueError(f"expected CBOR items, got an end after {num_items - 1} of them")
        length = LENGTH_OF_HEAD[data[place]]
        if length:
            place += length
            continue
        kind, argument, place = _long_head(data, place)
        if kind in (BYTES, TEXT):
            place += argument
            continue
        num_parts = argument << 1 if kind == MAP else argument if kind == ARRAY else 1
        if num_items + num_parts > most:
            return most + 1
        others.append(left)
        left = num_parts
        if len(others) > MAX_DEPTH:
            raise ValueError(f"expected items at most {MAX_DEPTH} deep, got deeper ones")
    if place != len(data):
        raise ValueError(f"expected one CBOR item of {len(data)} bytes, got one of {place}")
    return num_items


def _length_of(head: int) -> int:
    """Bytes of an item, by its first, where that tells it; 0: it does not, or the item has others in it."""
    kind, argument = head >> 5, head & 31
    if argument > LONGEST_ARGUMENT or kind in (ARRAY, MAP, TAG):
        return 0
    if argument < SHORT_ARGUMENTS:
        return 1 + argument if kind in (BYTES, TEXT) else 1
    return 0 if kind in (BYTES, TEXT) else 1 + (1 << (argument - SHORT_ARGUMENTS))


def _long_head(data: bytes, place: int) -> tuple[int, int, int]:
    """Major type and argument of the item at `place`, and where its head ends."""
    kind, argument = data[place] >> 5, data[place] & 31
    if argument > LONGEST_ARGUMENT:
        raise ValueError(f"expected CBOR items of told lengths, got head {data[place]:#x} at byte {place}")
    end = place + 1
    if argument >= SHORT_ARGUMENTS:
        end += 1 << (argument - SHORT_ARGUMENTS)
        argument = int.from_bytes(data[place + 1 : end], "big")
    if kind == TAG and argument not in BIGNUM_TAGS:
        raise ValueError(f"expected plain CBOR, got tag {argument} at byte {place}")
    return kind, argument, end


LENGTH_OF_HEAD = tuple(map(_length_of, range(256)))

__all__ = ["count_items", "inflate", "load_plain"]

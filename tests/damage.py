"""What becomes of bytes on disks, in stores and between peers: one bit, a stretch or the end of them is another."""

from __future__ import annotations

import random

MOST = 30  # bytes of a stretch


def flipped(data: bytes, place: int, bit: int = 2) -> bytes:
    """With one bit the other way, `place` bytes from the start, and round again from the end."""
    changed = bytearray(data)
    changed[place % len(changed)] ^= 1 << bit
    return bytes(changed)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """With one change: a bit flipped, a stretch cut out, put in, doubled or made another, or the end cut off.

    By chance the change is none, so that the bytes are those of before.
    """
    if not data:
        return rng.randbytes(rng.randint(1, MOST))
    begin = rng.randrange(len(data))
    end = min(begin + rng.randint(1, MOST), len(data))
    before, stretch, after = data[:begin], data[begin:end], data[end:]
    match rng.randrange(6):
        case 0:
            return flipped(data, begin, rng.randrange(8))
        case 1:
            return before + after
        case 2:
            return before + rng.randbytes(len(stretch)) + stretch + after
        case 3:
            return before + stretch + stretch + after
        case 4:
            return before + rng.randbytes(len(stretch)) + after
        case _:
            return before

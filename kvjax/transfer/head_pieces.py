"""Which heads go from which shard to which, between meshes that split them over other numbers of devices.

Flow:    heads, shards of the sender, shards of the receiver -> [head_pieces] -> slices of each pair that shares heads

With 8 heads, 2 shards that send and 4 that receive:

    sender    |  0  1  2  3  |  4  5  6  7  |
    receiver  |  0  1 |  2  3 |  4  5 |  6  7 |    pieces: (0, 0), (0, 1), (1, 2), (1, 3)

Each head of each receiving shard comes from one sender, so no byte travels twice.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadPiece:
    """Heads that shard `source` sends to shard `destination`, counted inside the source's own heads."""

    source: int
    destination: int
    start: int
    stop: int


def head_pieces(num_heads: int, num_sources: int, num_destinations: int) -> tuple[HeadPiece, ...]:
    """The pieces, by destination and then in the order of the heads.

    Raises:
        ValueError: the heads do not split evenly.
    """
    for shards in (num_sources, num_destinations):
        if shards < 1 or num_heads % shards:
            raise ValueError(f"expected shards that divide {num_heads} heads, got {shards}")
    sent, received = num_heads // num_sources, num_heads // num_destinations
    pieces = []
    for destination in range(num_destinations):
        head, end = destination * received, (destination + 1) * received
        while head < end:
            source = head // sent
            stop = min(end, (source + 1) * sent)
            pieces.append(HeadPiece(source, destination, head - source * sent, stop - source * sent))
            head = stop
    return tuple(pieces)

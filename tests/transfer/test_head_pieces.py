"""Every head of every receiving shard comes from one sender, from where it is there."""

from __future__ import annotations

import pytest

from kvjax.transfer.head_pieces import head_pieces

SHARDS = (1, 2, 3, 4, 6, 12)


@pytest.mark.parametrize("sources", SHARDS)
@pytest.mark.parametrize("destinations", SHARDS)
def test_pieces_put_every_head_in_its_place(sources: int, destinations: int) -> None:
    heads = list(range(12))
    held = [heads[i * 12 // sources : (i + 1) * 12 // sources] for i in range(sources)]
    received: list[list[int]] = [[] for _ in range(destinations)]
    for piece in head_pieces(12, sources, destinations):
        received[piece.destination] += held[piece.source][piece.start : piece.stop]
    assert received == [heads[i * 12 // destinations : (i + 1) * 12 // destinations] for i in range(destinations)]


def test_heads_that_do_not_split_are_refused() -> None:
    with pytest.raises(ValueError, match="expected shards that divide 8 heads, got 3"):
        head_pieces(8, 3, 1)

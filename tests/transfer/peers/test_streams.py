"""A large pull comes in several streams, over a connection each: every array once, or an error."""

from __future__ import annotations

from typing import Any

import cbor2
import chex
import jax
import numpy as np
import pytest

from kvjax.errors import TransferError
from kvjax.transfer import Source
from kvjax.transfer.head_part import HeadPart
from kvjax.transfer.peers import page_client, page_server
from kvjax.transfer.peers.wire import PullRequest
from tests.transfer.peers.one_offer import one_offer

REQUEST = PullRequest(b"o" * 16, HeadPart(1, 2, 4), True, 1, 3)


@pytest.mark.parametrize("num_streams", [1, 2, 3, 7])
def test_streams_bring_each_array_once(num_streams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_client, "NUM_STREAMS", num_streams)
    monkeypatch.setattr(page_client, "LEAST_SPLIT_BYTES", 1)
    with one_offer() as one:
        one.assert_serves()
        assert len(one.client._channels) == num_streams


def test_a_small_pull_comes_in_one() -> None:
    with one_offer() as one:
        one.assert_serves()
        assert len(one.client._channels) == 1


@pytest.mark.parametrize("place", range(8))
def test_a_stream_that_fails_ends_the_pull_and_no_other(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_client, "LEAST_SPLIT_BYTES", 1)
    with one_offer() as one, monkeypatch.context() as patch:
        ticket = one.client.read(one.offer())
        lost = [array for arrays in one.sent.arrays for array in arrays][place]
        right = page_server.on_host

        def on_host(array: Any, heads: range | None) -> Any:
            if array is lost:
                raise ValueError("planted")
            return right(array, heads)

        patch.setattr(page_server, "on_host", on_host)
        with pytest.raises(TransferError, match="INVALID_ARGUMENT: planted"):
            one.client.pull(ticket, one.writer).wait(20)
        assert one.server.num_offers == 1
        patch.undo()
        one.client.pull(ticket, one.writer).wait(20)
        one.assert_serves()


@pytest.mark.parametrize("num_sources", [2, 4])
def test_sources_that_share_the_heads_fill_one_array(num_sources: int) -> None:
    """Entries without heads come from the first alone."""
    with one_offer() as one:
        sources = []
        for i in range(num_sources):
            offer_id = one.server.offer_id(bytes([i]))
            one.server.hold(one.sent, offer_id, HeadPart(i, i + 1, num_sources))
            sources.append(Source(one.server.address, offer_id))
        ticket = one.client.read(one.server.ticket(sources, one.sent.header, one.request))
        found = one.client.pull(ticket, one.writer).wait(20)
        chex.assert_trees_all_equal(found.arrays, one.sent.arrays)


def test_a_process_without_devices_of_the_rank_asks_for_nothing_and_has_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    def dirty(shape: int, dtype: type) -> np.ndarray:
        return np.full(shape, 255, dtype)

    with one_offer() as one:
        ticket = one.client.read(one.offer())
        monkeypatch.setattr(one.writer, "own_heads", lambda rank: None)
        monkeypatch.setattr(page_client.np, "empty", dirty)
        found = one.client.pull(ticket, one.writer).wait(20)
        for array in jax.tree.leaves(found.arrays):
            assert not np.asarray(array).any()
        assert not {stream for _, stream in one.client._channels} - {0}


def test_a_request_comes_back_from_its_bytes() -> None:
    assert PullRequest.from_bytes(REQUEST.to_bytes()) == REQUEST


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *((0, value) for value in (b"o" * 15, "o" * 16, None)),
        *(
            (1, value)
            for value in ([1, 1, 4], [2, 1, 4], [-1, 1, 4], [1, 5, 4], [0, 1, 1 << 17], [1, 2], [1, 2, 4, 5], 1)
        ),
        *((2, value) for value in (1, None)),
        *((3, value) for value in (3, -1, True, 1.0, None)),
        *((4, value) for value in (1, 0, "3", [])),
    ],
)
def test_a_request_with_a_field_that_cannot_be_is_refused(place: int, value: Any) -> None:
    fields = cbor2.loads(REQUEST.to_bytes())
    fields[place] = value
    with pytest.raises(ValueError, match=r"expected (an offer|a request for pages|one of the streams)"):
        PullRequest.from_bytes(cbor2.dumps(fields))


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x80", b"\x81" * 300, cbor2.dumps([*range(6)]), bytes(100)])
def test_other_bytes_are_no_request(data: bytes) -> None:
    with pytest.raises(ValueError, match=f"expected a request for pages, got {len(data)} other bytes"):
        PullRequest.from_bytes(data)

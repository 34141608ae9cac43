"""What client and server say to each other: two methods of gRPC, and the bytes of a pull.

    Pull     PullRequest -> the bytes of all arrays that were asked for, in the order of the header, cut into chunks
    Release  offer -> nothing: everything has arrived

A pull has a deadline, which gRPC carries. The connection proves both sides and keeps bytes whole (TLS); a stream that
ends too early or too late is an error of the client.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cbor2
import numpy as np

from kvjax.core.save.bounded_cbor import load_plain
from kvjax.transfer.head_part import HeadPart
from kvjax.transfer.peers.ticket import OFFER_BYTES

SERVICE = "kvjax.transfer.Pages"
PULL, RELEASE = f"/{SERVICE}/Pull", f"/{SERVICE}/Release"
CHUNK_BYTES = 1 << 20
MAX_REQUEST_BYTES = 1 << 12
MAX_MEMORY_BYTES = 1 << 16  # of a request once it is read
MAX_PARTS = 1 << 16


@dataclass(frozen=True)
class PullRequest:
    """What a client wants of an offer."""

    offer: bytes
    part: HeadPart  # of the heads
    with_rest: bool  # also arrays that have no heads
    stream: int = 0  # of those that share a pull: array i of all that are wanted goes through stream i % num_streams
    num_streams: int = 1

    def to_bytes(self) -> bytes:
        """CBOR."""
        return cbor2.dumps([self.offer, list(self.part), self.with_rest, self.stream, self.num_streams])

    @classmethod
    def from_bytes(cls, data: bytes) -> PullRequest:
        """A request that `to_bytes` made.

        Raises:
            ValueError: it is none.
        """
        try:
            offer, part, with_rest, *streams = load_plain(data, MAX_MEMORY_BYTES)
            first, stop, num_parts = part
            stream, num_streams = streams
        except (TypeError, ValueError) as error:
            raise ValueError(f"expected a request for pages, got {len(data)} other bytes") from error
        numbers = (*part, *streams)
        has_types = all(type(number) is int for number in numbers) and type(with_rest) is bool and type(offer) is bytes
        if not has_types or len(offer) != OFFER_BYTES or not 0 <= first < stop <= num_parts <= MAX_PARTS:
            raise ValueError("expected an offer and a part of the heads in a request for pages, got others")
        if not 0 <= stream < num_streams:
            raise ValueError(f"expected one of the streams of a request for pages, got {stream} of {num_streams}")
        return cls(offer, HeadPart(first, stop, num_parts), with_rest, stream, num_streams)


def channel_options(peer_name: str) -> list[tuple[str, Any]]:
    """Of a client: a silent or dead peer is noticed within seconds, and no message is large."""
    return [
        ("grpc.ssl_target_name_override", peer_name),
        ("grpc.max_receive_message_length", 2 * CHUNK_BYTES),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.min_reconnect_backoff_ms", 2_000),  # also the time that a connection may take to be made
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),  # a channel that is made anew connects anew
    ]


def server_options() -> list[tuple[str, Any]]:
    """Of a server: who proves nothing within five seconds is cut off, and no request is large."""
    return [
        ("grpc.server_handshake_timeout_ms", 5_000),
        ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
        ("grpc.max_metadata_size", 8_192),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.so_reuseport", 0),  # a port that another process has is an error, not a shared one
    ]


def chunks(array: np.ndarray) -> Iterator[bytes]:
    """The bytes of an array in C order, in messages of at most `CHUNK_BYTES`."""
    flat = memoryview(array.reshape(-1).view(np.uint8))
    for start in range(0, len(flat), CHUNK_BYTES):
        yield bytes(flat[start : start + CHUNK_BYTES])


class Filler:
    """Arrays that a stream of messages fills one after the other."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        """Nothing has come; the arrays are C-contiguous and their contents are overwritten."""
        self._views = [memoryview(array.reshape(-1).view(np.uint8)) for array in arrays if array.size]
        self._begin = 0  # in the first view

    def add(self, message: bytes) -> None:
        """The next bytes.

        Raises:
            ValueError: they are more than the arrays take.
        """
        rest = memoryview(message)
        while rest:
            if not self._views:
                raise ValueError(f"expected the end of the entries, got {len(rest)} more bytes")
            view = self._views[0]
            size = min(len(rest), len(view) - self._begin)
            view[self._begin : self._begin + size] = rest[:size]
            rest, self._begin = rest[size:], self._begin + size
            if self._begin == len(view):
                del self._views[0]
                self._begin = 0

    def end(self) -> None:
        """There are no more bytes.

        Raises:
            ValueError: the arrays are not full.
        """
        if self._views:
            missing = sum(map(len, self._views)) - self._begin
            raise ValueError(f"expected {missing} more bytes of entries, got the end")


__all__ = [
    "CHUNK_BYTES",
    "PULL",
    "RELEASE",
    "SERVICE",
    "Filler",
    "PullRequest",
    "channel_options",
    "chunks",
    "server_options",
]

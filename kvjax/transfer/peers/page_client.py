"""The receiving side: reads tickets, and pulls what they name from peers that have the key.

Flow:    ticket (bytes) -> [PageClient.read] -> Ticket -> [PageClient.pull] -> Arrival -> PageWriter.write

Bytes are received by threads of this client, which also move them to the devices; the engine's thread only looks. A
peer that dies, is silent or sends too little makes the arrival raise `TransferError`: no page was written, and the
tokens are computed here. What failed is closed, so that the next pull connects anew.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core import Request
from kvjax.errors import TransferError
from kvjax.extras import require_extra
from kvjax.transfer.head_part import HEADS, HeadPart, overlap
from kvjax.transfer.peers.arrival import Arrival
from kvjax.transfer.peers.breaker import Breaker
from kvjax.transfer.peers.certificates import PEER_NAME, channel_credentials
from kvjax.transfer.peers.content import content_code
from kvjax.transfer.peers.key import TransferKey
from kvjax.transfer.peers.ticket import Source, Ticket
from kvjax.transfer.peers.wire import PULL, RELEASE, Filler, PullRequest, channel_options
from kvjax.transfer.sent_request import PageWriter, SentHeader, SentRequest

RELEASE_TIMEOUT_S = 5.0
NUM_STREAMS = 2  # of a pull from one source: decryption takes a core for each connection
LEAST_SPLIT_BYTES = 8 << 20  # of a pull that is worth several
ALIGNMENT = 64  # bytes, of an array that XLA's CPU devices take as it is

logger = logging.getLogger("kvjax.transfer")


@dataclass
class _Calls:
    """The calls of one pull that are under way, to be broken off."""

    is_cancelled: bool = False
    calls: list[Any] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def cancel(self) -> None:
        with self.lock:
            self.is_cancelled = True
            for call in self.calls:
                call.cancel()

    def add(self, call: Any) -> None:
        with self.lock:
            self.calls.append(call)
            if self.is_cancelled:
                call.cancel()


class PageClient:
    """Pulls entries for one process. Any thread may call."""

    def __init__(
        self,
        key: TransferKey,  # that its peers have
        *,
        timeout_s: float = 60.0,  # of a pull, from its beginning to its last byte
        max_pulls: int = 4,  # at a time; more wait
    ) -> None:
        """A client without connections.

        Raises:
            ValueError: a limit is not positive.
            MissingExtraError: grpcio or cryptography is not installed.
        """
        if not (timeout_s > 0 and max_pulls > 0):
            raise ValueError(f"expected positive limits, got {timeout_s=} and {max_pulls=}")
        self._grpc: Any = require_extra("grpc", "transfer", "a transfer between processes")
        self._key, self._timeout_s = key, timeout_s
        self._credentials = channel_credentials(self._grpc, key)
        self._channels: dict[tuple[str, int], Any] = {}  # by address and stream
        self._lock = threading.Lock()
        self._breaker = Breaker()
        self._threads = ThreadPoolExecutor(max_pulls, thread_name_prefix="kvjax-pull")
        self._streams = ThreadPoolExecutor(max_pulls * NUM_STREAMS, thread_name_prefix="kvjax-stream")

    def read(self, ticket: bytes) -> Ticket:
        """What a ticket says.

        Raises:
            ValueError: it is none, or was not signed with this client's key.
        """
        return Ticket.from_bytes(ticket, self._key)

    def matches(self, ticket: Ticket, request: Request) -> bool:
        """Whether a ticket is of a request's first tokens, with its salt, adapter and inputs."""
        stop = ticket.header.stop
        return stop <= request.num_tokens and content_code(self._key, request, stop) == ticket.content

    def pull(self, ticket: Ticket, writer: PageWriter, rank: int = 0) -> Arrival:
        """Begins to fetch a request's entries for a data rank's pages of `writer`; returns at once.

        Of several processes each fetches the heads that its own devices hold, and nothing for other data ranks. Once
        all have them `release` is called; one process alone does so by itself.

        Raises:
            ValueError: other layers or weights, or a field that cannot be. Nothing is asked for.
            TransferError: a peer of the ticket has failed several times in a row, a moment ago.
        """
        writer.check(ticket.header)
        for source in ticket.sources:
            self._breaker.check(source.address)
        calls = _Calls()
        future = self._threads.submit(self._fetch, ticket, writer, rank, calls)
        return Arrival(ticket, future, calls.cancel)

    def release(self, ticket: Ticket) -> None:
        """Tells a ticket's peers that all has arrived in all processes; waits for nothing."""
        for source in ticket.sources:
            call = self._channel(source.address).unary_unary(RELEASE)
            release = call.future(source.offer, timeout=RELEASE_TIMEOUT_S)
            release.add_done_callback(_log_release)  # which also keeps the call: one that is collected is cancelled

    def close(self) -> None:
        """Closes connections; pulls under way fail."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._streams.shutdown(wait=False, cancel_futures=True)
        for address in {address for address, _ in self._channels}:
            self._disconnect(address)

    def _fetch(self, ticket: Ticket, writer: PageWriter, rank: int, calls: _Calls) -> SentRequest:
        """On a thread: all entries, on the devices that the pages of `writer` lie on."""
        part = writer.own_heads(rank)
        arrays = _empty(ticket.header, part)
        if part is None:
            return _on_devices(ticket.header, arrays, writer)
        streams = [self._streams.submit(self._receive, *one, calls) for one in _streams_of(ticket, arrays, part)]
        done, _ = wait(streams, return_when=FIRST_EXCEPTION)
        errors = [error for stream in done if (error := stream.exception()) is not None]
        if errors:
            calls.cancel()  # the other streams
            raise errors[0]
        sent = _on_devices(ticket.header, arrays, writer)
        if not writer.spans_processes:
            self.release(ticket)
        return sent

    def _receive(self, source: Source, wanted: PullRequest, arrays: Sequence[np.ndarray], calls: _Calls) -> None:
        """Fills arrays with what a source has of them, over a connection of the stream's own."""
        own = [np.zeros(array.shape, array.dtype) if not array.flags.c_contiguous else array for array in arrays]
        if not any(array.size for array in own):
            return
        filler = Filler(own)
        channel = self._channel(source.address, wanted.stream)
        try:
            stream = channel.unary_stream(PULL)(wanted.to_bytes(), timeout=self._timeout_s)
            calls.add(stream)
            for message in stream:
                filler.add(message)
            filler.end()
        except (self._grpc.RpcError, ValueError) as error:
            raise self._failed(source, error, is_cancelled=calls.is_cancelled) from error
        self._breaker.succeeded(source.address)
        for array, received in zip(arrays, own, strict=True):
            if received is not array:
                array[...] = received

    def _failed(self, source: Source, error: Exception, *, is_cancelled: bool) -> TransferError:
        """What a caller is told. A connection that may be at fault is closed."""
        codes = self._grpc.StatusCode
        code = error.code() if isinstance(error, self._grpc.RpcError) else None
        details = str(error) if code is None else f"{code.name}: {error.details()}"  # type: ignore[attr-defined]
        if not is_cancelled and code not in (codes.NOT_FOUND, codes.INVALID_ARGUMENT):
            self._breaker.failed(source.address)
            self._disconnect(source.address)
        return TransferError(f"{source.address}: {details}")

    def _channel(self, address: str, stream: int = 0) -> Any:
        """The connection to a peer, or a new one."""
        with self._lock:
            if (address, stream) not in self._channels:
                options = channel_options(PEER_NAME)
                channel = self._grpc.secure_channel(address, self._credentials, options=options)
                self._channels[address, stream] = channel
            return self._channels[address, stream]

    def _disconnect(self, address: str) -> None:
        with self._lock:
            channels = [self._channels.pop((address, stream), None) for stream in range(NUM_STREAMS)]
        for channel in channels:
            if channel is not None:
                channel.close()


Empty = tuple[np.ndarray, range | None]  # an array, and which heads it has


def _streams_of(
    ticket: Ticket, arrays: list[Empty], part: HeadPart
) -> Iterator[tuple[Source, PullRequest, list[np.ndarray]]]:
    """What is asked of each source in each stream, and the arrays that it fills."""
    for place, source in enumerate(ticket.sources):
        share = HeadPart(place, place + 1, len(ticket.sources))
        into = []
        for array, heads in arrays:
            own = array if heads is None else _of_share(array, heads, share, part)
            if place == 0 if heads is None else own.shape[HEADS]:
                into.append(own)
        num_streams = NUM_STREAMS if sum(array.nbytes for array in into) >= LEAST_SPLIT_BYTES else 1
        for stream in range(num_streams):
            wanted = PullRequest(source.offer, part, place == 0, stream, num_streams)
            yield source, wanted, into[stream::num_streams]


def _empty(header: SentHeader, part: HeadPart | None) -> list[Empty]:
    """An array to fill for each of the header, with the heads of this process; None: it has none, and gets zeros."""
    arrays: list[Empty] = []
    for layer in header.layers:
        for shape, dtype in zip(layer.shapes, layer.dtypes, strict=True):
            heads = None
            if layer.has_heads:
                heads = range(0) if part is None else part.heads(shape[0])
            own = shape if heads is None else (len(heads), *shape[1:])
            arrays.append((_aligned((layer.num_entries, *own), jnp.dtype(dtype), is_zero=part is None), heads))
    return arrays


def _aligned(shape: tuple[int, ...], dtype: np.dtype, *, is_zero: bool) -> np.ndarray:
    """An array that a CPU device takes without a copy."""
    num_bytes = math.prod(shape) * dtype.itemsize + ALIGNMENT
    buffer = np.zeros(num_bytes, np.uint8) if is_zero else np.empty(num_bytes, np.uint8)
    return np.ndarray(shape, dtype, buffer, -buffer.ctypes.data % ALIGNMENT)


def _of_share(array: np.ndarray, heads: range, share: HeadPart, part: HeadPart) -> np.ndarray:
    """The view of an array with `heads` that a source with a share of all heads fills."""
    num_heads = len(heads) * part.num_parts // (part.stop - part.first)
    both = overlap(heads, share.heads(num_heads))
    return array[:, both.start - heads.start : max(both.start, both.stop) - heads.start]


def _on_devices(header: SentHeader, arrays: list[Empty], writer: PageWriter) -> SentRequest:
    """Arrays of all entries where `writer` wants them; what this process did not fetch is zero."""
    rest = iter(arrays)
    placed = []
    for layer, shardings in zip(header.layers, writer.shardings(header), strict=True):
        found = []
        for shape, sharding in zip(layer.shapes, shardings, strict=True):
            array, heads = next(rest)
            whole = (layer.num_entries, *shape)
            found.append(jax.make_array_from_callback(whole, sharding, partial(_piece, array, heads, whole)))
        placed.append(tuple(found))
    return SentRequest(header, tuple(placed))


def _log_release(release: Any) -> None:
    if release.code().value[0]:
        logger.info("an offer was not released and will expire: %s", release.details())


def _piece(array: np.ndarray, heads: range | None, shape: tuple[int, ...], index: Any) -> np.ndarray:
    """What a device holds of an array of `shape`, of which `array` has `heads`; other heads are zero."""
    if heads is None:
        return array
    start, stop, _ = index[HEADS].indices(shape[HEADS])
    if start < heads.start or stop > heads.stop:
        return np.zeros((shape[0], stop - start, *shape[2:]), array.dtype)
    return array[:, start - heads.start : stop - heads.start]


__all__ = ["PageClient"]

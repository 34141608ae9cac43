"""The sending side: entries of requests wait here until a peer that has the key pulls them.

Flow:    SentRequest + Request -> [PageServer.offer] -> ticket (bytes) -> the caller's own channel -> PageClient
Source:  llm-d and tpu-inference call the two sides producer and consumer

Whoever connects without the key is refused by TLS before anything of ours runs. Entries stay on this process's devices
until they are pulled, and are copied to the host while a pull goes on.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

import jax

from kvjax.core import Request
from kvjax.extras import require_extra
from kvjax.transfer.head_part import ALL, HeadPart, on_host, overlap
from kvjax.transfer.peers.certificates import server_credentials
from kvjax.transfer.peers.content import content_code
from kvjax.transfer.peers.key import TransferKey
from kvjax.transfer.peers.offers import Offer, Offers
from kvjax.transfer.peers.ticket import OFFER_BYTES, Source, Ticket, split_address
from kvjax.transfer.peers.wire import PULL, RELEASE, PullRequest, chunks, server_options
from kvjax.transfer.sent_request import SentHeader, SentRequest

MAX_WAITING = 256  # pulls that wait for a thread; more are refused


class PageServer:
    """Serves one process's entries. Any thread may call."""

    def __init__(
        self,
        key: TransferKey,  # that its clients have
        address: str = "127.0.0.1:0",  # where it listens; port 0: a free one
        *,
        public_address: str | None = None,  # what clients connect to, port 0: that of `address`; None: `address`
        offer_ttl_s: float = 120.0,  # after which entries that nobody has pulled are forgotten
        max_offer_bytes: int = 8 << 30,  # of entries that wait; the oldest are forgotten first
        max_pulls: int = 8,  # streams of pulls at a time
    ) -> None:
        """Listens from here on.

        Raises:
            ValueError: the address is none, or taken; or a limit is not positive.
            MissingExtraError: grpcio or cryptography is not installed.
        """
        public_host, public_port = _host_and_port(address if public_address is None else public_address)
        _host_and_port(address)
        if not (offer_ttl_s > 0 and max_offer_bytes > 0 and max_pulls > 0):
            raise ValueError(f"expected positive limits, got {offer_ttl_s=}, {max_offer_bytes=} and {max_pulls=}")
        self._grpc: Any = require_extra("grpc", "transfer", "a transfer between processes")
        self._key = key
        self._offers = Offers(offer_ttl_s, max_offer_bytes)
        self._server = self._grpc.server(
            ThreadPoolExecutor(max_pulls, thread_name_prefix="kvjax-pull"),
            options=server_options(),
            maximum_concurrent_rpcs=max_pulls + MAX_WAITING,
        )
        self._server.add_generic_rpc_handlers([_Methods(self._grpc, self._offers)])
        try:
            port_number = self._server.add_secure_port(address, server_credentials(self._grpc, key))
        except RuntimeError as error:
            self._offers.close()
            raise ValueError(f"expected an address to listen at, got {address!r}: {error}") from error
        self._address = f"{public_host}:{public_port or port_number}"
        self._server.start()

    @property
    def address(self) -> str:
        """Where clients connect."""
        return self._address

    @property
    def num_offers(self) -> int:
        """Offers that wait."""
        return len(self._offers)

    @property
    def num_expired(self) -> int:
        """Offers that were forgotten before somebody pulled them, since the start."""
        return self._offers.num_expired

    def offer(self, sent: SentRequest, request: Request) -> bytes:
        """Holds a request's entries for one pull; the ticket for it.

        Raises:
            ValueError: the request has fewer tokens than entries were read of.
        """
        ticket = partial(self.ticket, header=sent.header, request=request)
        offer_id = secrets.token_bytes(OFFER_BYTES)
        data = ticket([Source(self._address, offer_id)])
        self.hold(sent, offer_id)
        return data

    def hold(self, sent: SentRequest, offer_id: bytes, share: HeadPart = ALL) -> None:
        """Holds what this process has of a request's entries, a share of the heads, under an id of 16 bytes."""
        self._offers.add(offer_id, sent, share)

    def offer_id(self, name: bytes) -> bytes:
        """An id that whoever has the key makes of a name, and nobody else."""
        return self._key.sign("offer", name)[:OFFER_BYTES]

    def ticket(self, sources: Sequence[Source], header: SentHeader, request: Request) -> bytes:
        """A signed ticket for entries that several processes hold.

        Raises:
            ValueError: the request has fewer tokens than entries were read of.
        """
        if request.num_tokens < header.stop:
            raise ValueError(f"expected a request of at least {header.stop} tokens, got {request.num_tokens}")
        content = content_code(self._key, request, header.stop)
        return Ticket(tuple(sources), content, header).to_bytes(self._key)

    def close(self) -> None:
        """Hears nobody any more; offers are forgotten, and pulls under way broken off."""
        self._server.stop(0).wait()
        self._offers.close()


class _Methods:
    """A `grpc.GenericRpcHandler`."""

    def __init__(self, grpc: Any, offers: Offers) -> None:
        self._grpc, self._offers = grpc, offers

    def service(self, details: Any) -> Any:
        """The handler of a call; None: there is no such method."""
        if details.method == PULL:
            return self._grpc.unary_stream_rpc_method_handler(self._pull)
        if details.method == RELEASE:
            return self._grpc.unary_unary_rpc_method_handler(self._release)
        return None

    def _pull(self, data: bytes, context: Any) -> Iterator[bytes]:
        codes = self._grpc.StatusCode
        try:
            wanted = PullRequest.from_bytes(data)
            offer = self._offers.get(wanted.offer)
            if offer is None:
                context.abort(codes.NOT_FOUND, "the offer was taken, has expired, or never was")
            else:
                for array, heads in islice(_wanted(offer, wanted), wanted.stream, None, wanted.num_streams):
                    yield from chunks(on_host(array, heads))
        except ValueError as error:
            context.abort(codes.INVALID_ARGUMENT, str(error))

    def _release(self, data: bytes, context: Any) -> bytes:
        if len(data) == OFFER_BYTES:
            self._offers.drop(data)
        return b""


def _host_and_port(address: str) -> tuple[str, int]:
    parts = split_address(address)
    if parts is None:
        raise ValueError(f"expected host:port, got {address!r}; port 0 is a free one")
    return parts


def _wanted(offer: Offer, wanted: PullRequest) -> Iterator[tuple[jax.Array, range | None]]:
    """Arrays of an offer, in the order of its header, and the heads of each that are wanted; None: it has none."""
    for layer, arrays in zip(offer.sent.header.layers, offer.sent.arrays, strict=True):
        for array in arrays:
            if layer.has_heads:
                heads = overlap(offer.share.heads(array.shape[1]), wanted.part.heads(array.shape[1]))
                if heads:
                    yield array, heads
            elif wanted.with_rest:
                yield array, None


__all__ = ["PageServer"]

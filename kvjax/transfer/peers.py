"""Requests sent from one process to another, device to device, by `jax.experimental.transfer`.

Flow:    prefill process: SentRequest -> [PageServer.offer] -> Ticket (bytes) -> the caller's own channel ->
         decode process: [PageClient.pull] -> Arrival -> PageWriter.write
Source:  jax/experimental/transfer.py; llm-d and tpu-inference call the two sides producer and consumer

The client asks for the pieces that its own devices need; nothing is sent before that, and no host copy is made where
the platform moves device memory itself. A peer that dies, or does not answer, makes the arrival raise
`TransferError`: no page was written, and the prompt is computed here.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import cbor2
import jax
from jax.experimental import transfer
from jax.sharding import NamedSharding

from kvjax.errors import TransferError
from kvjax.transfer.sent_request import LayerHeader, PageWriter, SentHeader, SentRequest
from kvjax.transfer.shard_pieces import cut, joined, piece_shapes

FORMAT = 1  # of tickets
POLL_S = 1e-3


@dataclass(frozen=True)
class Ticket:
    """Where one request's entries wait, and what they are."""

    address: str
    uuid: int
    num_receivers: int  # parts of heads that they were cut for
    header: SentHeader

    def to_bytes(self) -> bytes:
        """CBOR."""
        return cbor2.dumps({"format": FORMAT, **asdict(self)})

    @classmethod
    def from_bytes(cls, data: bytes) -> Ticket:
        """A ticket that `to_bytes` made.

        Raises:
            ValueError: it is none, or of another format.
        """
        fields = _decoded(data)
        if fields.pop("format") != FORMAT:
            raise ValueError(f"expected a ticket of format {FORMAT}; run one version of kvjax on both sides")
        header = fields.pop("header")
        layers = tuple(
            LayerHeader(**{name: _frozen(value) for name, value in layer.items()}) for layer in header.pop("layers")
        )
        return cls(header=SentHeader(**header, layers=layers), **fields)


class PageServer:
    """The sending side of one process. Entries stay on its devices until they are pulled or the process ends."""

    def __init__(
        self,
        address: str = "127.0.0.1:0",  # host and port of this process; port 0: a free one
    ) -> None:
        self._server = transfer.start_transfer_server(jax.devices()[0].client, address, [address])
        self._uuids = itertools.count(1)

    @property
    def address(self) -> str:
        """Where clients connect."""
        return str(self._server.address())

    def offer(self, sent: SentRequest, num_receivers: int) -> Ticket:
        """Holds a request's entries for one pull, by a client whose heads are split over so many devices.

        Raises:
            ValueError: the heads do not split so.
        """
        pieces: list[jax.Array] = []
        for layer, arrays in zip(sent.header.layers, sent.arrays, strict=True):
            for array in arrays:
                pieces += cut(array, num_receivers if layer.has_heads else 1)
        ticket = Ticket(self.address, next(self._uuids), num_receivers, sent.header)
        self._server.await_pull(ticket.uuid, pieces)
        return ticket


class PageClient:
    """The receiving side of one process, with its open connections."""

    def __init__(
        self,
        address: str = "127.0.0.1:0",  # host and port of this process; port 0: a free one
    ) -> None:
        self._server = transfer.start_transfer_server(jax.devices()[0].client, address, [address])
        self._connections: dict[str, transfer.TransferConnection] = {}

    def pull(self, ticket: Ticket, writer: PageWriter) -> Arrival:
        """Begins to fetch a request's entries for the pages of `writer`; returns at once.

        Raises:
            ValueError: other layers or weights, or entries cut for another number of devices. Nothing is asked for.
            TransferError: nobody answers at the ticket's address.
        """
        writer.check(ticket.header)
        if ticket.num_receivers != writer.num_shards:
            raise ValueError(
                f"expected entries cut for {writer.num_shards} devices, got {ticket.num_receivers}; give `offer` "
                "the receiver's number"
            )
        shardings = writer.shardings(ticket.header)
        shapes = [
            shape
            for layer, targets in zip(ticket.header.layers, shardings, strict=True)
            for entry, dtype, target in zip(layer.shapes, layer.dtypes, targets, strict=True)
            for shape in piece_shapes((layer.num_entries, *entry), dtype, layer.num_shards, target)
        ]
        try:
            pieces = self._connection(ticket.address).pull(ticket.uuid, shapes)
        except RuntimeError as error:
            raise _lost(ticket, error) from error
        return Arrival(ticket, pieces, shardings, on_loss=lambda: self._connections.pop(ticket.address, None))

    def _connection(self, address: str) -> transfer.TransferConnection:
        """The open connection to a peer, or a new one."""
        if address not in self._connections:
            self._connections[address] = self._server.connect(address)
        return self._connections[address]


class Arrival:
    """Entries on their way to this process."""

    def __init__(
        self,
        ticket: Ticket,
        pieces: list[jax.Array],
        shardings: tuple[tuple[NamedSharding, ...], ...],
        on_loss: Callable[[], object],
    ) -> None:
        self._ticket, self._pieces, self._shardings, self._on_loss = ticket, pieces, shardings, on_loss

    @property
    def is_ready(self) -> bool:
        """Whether `wait` returns, or raises, at once."""
        return all(piece.is_ready() for piece in self._pieces)  # type: ignore[attr-defined]

    def wait(self, timeout_s: float = 60.0) -> SentRequest:
        """The entries, once all are here.

        Raises:
            TransferError: the peer died or did not answer in time. Nothing was written.
        """
        end = time.monotonic() + timeout_s  # jax waits for ever where nobody offers a ticket
        while not self.is_ready:
            if time.monotonic() > end:
                raise _lost(self._ticket, f"no answer in {timeout_s} s")
            time.sleep(POLL_S)
        try:
            jax.block_until_ready(self._pieces)
        except RuntimeError as error:
            self._on_loss()
            raise _lost(self._ticket, error) from error
        pieces = iter(self._pieces)
        header = self._ticket.header
        arrays = tuple(
            tuple(
                joined((layer.num_entries, *shape), layer.num_shards, target, pieces)
                for shape, target in zip(layer.shapes, targets, strict=True)
            )
            for layer, targets in zip(header.layers, self._shardings, strict=True)
        )
        return SentRequest(header, arrays)


def _lost(ticket: Ticket, error: Exception | str) -> TransferError:
    """What a caller is told."""
    return TransferError(
        f"tokens {ticket.header.first} to {ticket.header.stop} did not arrive from {ticket.address}: {error}; compute "
        "them here"
    )


def _decoded(data: bytes) -> dict[str, Any]:
    """The fields of a ticket. Raises ValueError where the bytes are none."""
    try:
        fields = cbor2.loads(data)
    except (cbor2.CBORDecodeError, EOFError) as error:
        raise ValueError(f"expected a ticket of kvjax.transfer, got {len(data)} other bytes") from error
    if not isinstance(fields, dict) or fields.keys() != {
        "format",
        *(field.name for field in dataclasses.fields(Ticket)),
    }:
        raise ValueError(f"expected a ticket of kvjax.transfer, got {len(data)} other bytes")
    return fields


def _frozen(value: Any) -> Any:
    """Lists as tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value

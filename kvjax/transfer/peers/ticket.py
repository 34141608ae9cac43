"""Where one request's entries wait, what they are, and of what; as bytes that nobody without the key can make.

Flow:    PageServer.offer -> [Ticket.to_bytes] -> the caller's own channel -> [Ticket.from_bytes] -> PageClient.pull

    bytes: b"kvjaxT02", an HMAC-SHA256 of the rest, CBOR of the fields

The code is checked before anything is decoded; then every field is, since a peer that has the key may have faults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import cbor2
import numpy as np

from kvjax.core.save.bounded_cbor import load_plain
from kvjax.transfer.peers.key import TransferKey
from kvjax.transfer.sent_request import LayerHeader, SentHeader

MAGIC = b"kvjaxT02"  # with the format's number
CODE_BYTES = 32
MAX_BYTES = 4 << 20
MAX_MEMORY_BYTES = 64 << 20  # of its fields once they are read
MAX_COLUMNS = 1 << 22  # of a layer
OFFER_BYTES = 16
INT32_END = 1 << 31

T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """One process that has entries: of the heads an equal share, in the order of the sources."""

    address: str  # host:port
    offer: bytes  # 16 random bytes


@dataclass(frozen=True)
class Ticket:
    """One request's entries at a peer."""

    sources: tuple[Source, ...]
    content: bytes  # `content_code` of the request
    header: SentHeader

    def to_bytes(self, key: TransferKey) -> bytes:
        """The signed ticket."""
        layers = [
            [
                layer.name,
                [list(shape) for shape in layer.shapes],
                list(layer.dtypes),
                layer.num_entries,
                layer.entries_per_page,
                layer.has_heads,
                _runs(layer.columns),
            ]
            for layer in self.header.layers
        ]
        header = [self.header.first, self.header.stop, self.header.weights_version, layers]
        sources = [[source.address, source.offer] for source in self.sources]
        fields = cbor2.dumps([sources, self.content, header])
        return MAGIC + key.sign("ticket", fields) + fields

    @classmethod
    def from_bytes(cls, data: bytes, key: TransferKey) -> Ticket:
        """A ticket that a holder of the key made.

        Raises:
            ValueError: it is none, of another format, signed with another key, or a field cannot be.
        """
        begin = len(MAGIC) + CODE_BYTES
        if not isinstance(data, bytes) or not begin < len(data) <= MAX_BYTES or not data.startswith(MAGIC[:-2]):
            size = f"{len(data)} other bytes" if isinstance(data, bytes) else type(data).__name__
            raise ValueError(f"expected a ticket of kvjax.transfer, got {size}")
        if not data.startswith(MAGIC):
            raise ValueError(
                f"expected a ticket of format {MAGIC[-2:]!r}, got {data[6:8]!r}; run one version of kvjax on both sides"
            )
        if not key.signed("ticket", data[begin:], data[len(MAGIC) : begin]):
            raise ValueError("expected a ticket signed with this key, got another code; give both sides one key")
        try:
            fields = load_plain(data[begin:], MAX_MEMORY_BYTES)
        except ValueError as error:
            raise ValueError(f"expected fields of a ticket, got other bytes: {error}") from error
        return _ticket(fields)


def split_address(address: str) -> tuple[str, int] | None:
    """Host and port; None: it is not `host:port`."""
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 1 << 16
    return (host, int(port)) if host and is_port else None


def _ticket(fields: Any) -> Ticket:
    sources, content, header = _list(fields, "fields", 3)
    first, stop, weights_version, layers = _list(header, "header", 4)
    first, stop = _integer(first, "first token", 0), _integer(stop, "end of the tokens", 1)
    if first >= stop:
        raise ValueError(f"expected tokens in a ticket, got {first} to {stop}")
    found = tuple(_layer(layer) for layer in _list(layers, "layers"))
    names = [layer.name for layer in found]
    if not found or len({*names}) < len(names):
        raise ValueError(f"expected layers of unlike names in a ticket, got {len(names)} of {len({*names})} names")
    places = tuple(_source(source) for source in _list(sources, "sources"))
    if not places:
        raise ValueError("expected a source in a ticket, got none")
    return Ticket(
        places,
        _bytes(content, "content", CODE_BYTES),
        SentHeader(first, stop, _of_type(weights_version, "weights version", str), found),
    )


def _source(fields: Any) -> Source:
    address, offer = _list(fields, "source", 2)
    address = _of_type(address, "address", str)
    parts = split_address(address)
    if parts is None or not parts[1]:
        raise ValueError(f"expected host:port in a ticket, got {address[:80]!r}")
    return Source(address, _bytes(offer, "offer", OFFER_BYTES))


def _layer(fields: Any) -> LayerHeader:
    name, shapes, dtypes, num_entries, entries_per_page, has_heads, runs = _list(fields, "layer", 7)
    sizes = tuple(_shape(shape) for shape in _list(shapes, "shapes"))
    return LayerHeader(
        _of_type(name, "layer name", str),
        sizes,
        tuple(_of_type(dtype, "dtype", str) for dtype in _list(dtypes, "dtypes", len(sizes))),
        _integer(num_entries, "number of entries", 0),
        _integer(entries_per_page, "entries of a page", 1),
        _of_type(has_heads, "has_heads", bool),
        _columns(_list(runs, "columns")),
    )


def _shape(sizes: Any) -> tuple[int, ...]:
    return tuple(_integer(size, "size", 1) for size in _list(sizes, "shape"))


def _runs(columns: Sequence[int]) -> list[list[int]]:
    """Ascending integers as [begin, end) of runs."""
    array = np.asarray(columns, np.int64)
    if not array.size:
        return []
    begins = np.concatenate([[0], np.flatnonzero(np.diff(array) != 1) + 1])
    ends = np.append(begins[1:], array.size) - 1
    return np.stack([array[begins], array[ends] + 1], axis=1).tolist()  # type: ignore[no-any-return]


def _columns(runs: list[Any]) -> tuple[int, ...]:
    columns: list[int] = []
    end = -1
    for run in runs:
        begin, stop = (_integer(bound, "column", 0) for bound in _list(run, "run of columns", 2))
        if not end < begin < stop or len(columns) + stop - begin > MAX_COLUMNS:
            raise ValueError(f"expected rising columns in a ticket, got {begin} to {stop} behind {end}")
        columns += range(begin, stop)
        end = stop
    return tuple(columns)


def _list(value: Any, what: str, size: int | None = None) -> list[Any]:
    found = _of_type(value, what, list)
    if size is not None and len(found) != size:
        raise ValueError(f"expected {size} of {what} in a ticket, got {len(found)}")
    return found


def _integer(value: Any, what: str, least: int) -> int:
    number = _of_type(value, what, int)
    if not least <= number < INT32_END:
        raise ValueError(f"expected {what} in [{least}, 2**31) in a ticket, got {number}")
    return number


def _bytes(value: Any, what: str, size: int) -> bytes:
    found = _of_type(value, what, bytes)
    if len(found) != size:
        raise ValueError(f"expected {size} bytes of {what} in a ticket, got {len(found)}")
    return found


def _of_type(value: Any, what: str, kind: type[T]) -> T:
    if type(value) is not kind:
        raise ValueError(f"expected {what} of type {kind.__name__} in a ticket, got {type(value).__name__}")
    return value


__all__ = ["Source", "Ticket", "split_address"]

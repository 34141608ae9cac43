"""A request's entries on their way: per layer arrays that no layout packs, and which columns of the sender they fill.

Flow:    KVPages + RequestPages -> [PageReader] -> SentRequest -> another mesh or process -> [PageWriter] -> KVPages

    cache = reader.read(pages, request_pages(manager, row, 0, num_tokens))
    pages = writer.write(pages, request_pages(other, row, 0, num_tokens), writer.placed(cache))

`SentRequest.header` is plain data that tells a receiver what the arrays are; it is all that is checked before a byte
is moved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from kvjax.core.spec import KVCacheConfig, KVCacheSpec
from kvjax.device.mesh.placement import Placement
from kvjax.device.mesh.processes import spans_processes
from kvjax.device.mesh.transfers import hands_over
from kvjax.device.pages.kv_pages import KVPages
from kvjax.device.pages.rank_pages import part_of_rank
from kvjax.transfer.entries import Arrays
from kvjax.transfer.entry_map import NOT_SENT, ReceivedPages, SentPages, received_pages, sent_pages
from kvjax.transfer.head_homes import own_heads
from kvjax.transfer.head_part import HeadPart
from kvjax.transfer.layer_pages import LayerPages, layers_of, padded_ids, padded_length, read_entries, write_entries
from kvjax.transfer.request_span import RequestPages, check_tables
from pallas_kernels.layouts import cdiv


@dataclass(frozen=True)
class LayerHeader:
    """What is sent of one layer."""

    name: str
    shapes: tuple[tuple[int, ...], ...]  # of each array of entries, all heads
    dtypes: tuple[str, ...]
    num_entries: int  # of all pages sent, padding included
    entries_per_page: int
    has_heads: bool  # they may be split over devices; else every device holds the whole
    columns: tuple[int, ...]  # of the sender's block table


@dataclass(frozen=True)
class SentHeader:
    """What is sent of one request: its tokens `first` to `stop - 1`."""

    first: int
    stop: int
    weights_version: str
    layers: tuple[LayerHeader, ...]


@dataclass(frozen=True)
class SentRequest:
    """Entries of a request's tokens on some mesh: `arrays[i]` those of `header.layers[i]`."""

    header: SentHeader
    arrays: tuple[Arrays, ...]


class PageReader:
    """Reads requests out of the pages of one deployment. Holds no pages; calls cost one dispatch a group."""

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        placement: Placement,  # of the deployment's pages
        *,
        weights_version: str = "",  # stands for all that K and V depend on; both sides have to agree
    ) -> None:
        self._config, self._weights_version = kv_cache_config, weights_version
        self._layers, self._num_data = layers_of(kv_cache_config, placement), placement.num_data

    @hands_over
    def read(self, pages: KVPages, request: RequestPages) -> SentRequest:
        """Copies of the request's entries; the pages may be written to or freed as soon as this returns.

        Raises:
            ValueError: not a table for each group, one of too few columns, or of a data rank that there is not.
        """
        check_tables(self._config, request, self._num_data)
        headers, arrays = [], []
        for batch in batches(self._config, self._layers):
            sent = sent_pages(request.tables[batch.group_id], batch.entries_per_page, *request.entries(batch.spec))
            page_ids = padded_ids(sent.page_ids, request.rank, self._num_data)
            headers += [_header(layer, sent, page_ids.shape[1] * batch.entries_per_page) for layer in batch.layers]
            entries = read_entries(pages, batch.layers, page_ids)
            arrays += jax.tree.map(lambda array: part_of_rank(array, request.rank, self._num_data), entries)
        header = SentHeader(request.first, request.stop, self._weights_version, tuple(headers))
        return SentRequest(header, tuple(arrays))


class PageWriter:
    """Writes requests that were sent into the pages of one deployment, whose layout and mesh may be others."""

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        placement: Placement,  # of the deployment's pages
        *,
        weights_version: str = "",  # stands for all that K and V depend on; both sides have to agree
    ) -> None:
        self._config, self._placement, self._weights_version = kv_cache_config, placement, weights_version
        self._layers = {layer.name: layer for layer in layers_of(kv_cache_config, placement)}

    @property
    def spans_processes(self) -> bool:
        """Whether other processes write parts of what this one writes."""
        return spans_processes(self._placement.mesh)

    def own_heads(self, rank: int) -> HeadPart | None:
        """The heads of a data rank that this process's devices hold; None: it has no device of the rank."""
        return own_heads(self._placement, rank)

    def check(self, header: SentHeader) -> None:
        """Raises ValueError unless entries of this header are those of the deployment's layers and weights."""
        if header.weights_version != self._weights_version:
            raise ValueError(
                f"expected KV of weights {self._weights_version!r}, got {header.weights_version!r}; compute the prompt"
            )
        sent = {layer.name: (layer.shapes, layer.dtypes) for layer in header.layers}
        own = {name: (layer.entry_shapes, layer.dtypes) for name, layer in self._layers.items()}
        differ = sorted(name for name in sent.keys() | own.keys() if sent.get(name) != own.get(name))
        if differ:
            name = differ[0]
            raise ValueError(
                f"{len(differ)} layers differ; layer {name!r}: expected entries {own.get(name, 'none')}, got "
                f"{sent.get(name, 'none')}; both sides need the same model and cache dtype"
            )
        for layer in header.layers:
            self._check_layer(layer, header.stop)

    def _check_layer(self, header: LayerHeader, stop: int) -> None:
        """Raises ValueError unless a layer's numbers are such as `PageReader` makes them."""
        layer = self._layers[header.name]
        spec = self._config.kv_cache_groups[layer.group_id].spec_of(layer.column)
        num_entries = 1 if spec.state_pages is not None else stop // spec.tokens_per_state
        end = cdiv(num_entries, header.entries_per_page)
        bounded = np.array([-1, *header.columns, end], np.int64)
        expected = padded_length(len(header.columns)) * header.entries_per_page
        is_rising = bool((np.diff(bounded) > 0).all())
        if not is_rising or header.num_entries != expected or header.has_heads != layer.has_heads:
            raise ValueError(
                f"layer {header.name!r}: expected rising columns below {end}, {expected} entries and has_heads "
                f"{layer.has_heads}, got {len(bounded) - 2} columns, {header.num_entries} and {header.has_heads}"
            )

    def shardings(self, header: SentHeader) -> tuple[tuple[NamedSharding, ...], ...]:
        """Where each array has to be before it is written: heads split as the pages are."""
        mesh = self._placement.mesh
        return tuple(
            tuple(NamedSharding(mesh, spec) for spec in self._layers[layer.name].entry_specs) for layer in header.layers
        )

    def placed(self, sent: SentRequest) -> SentRequest:
        """The arrays moved to this deployment's mesh, from another one of the same process."""
        self.check(sent.header)
        return SentRequest(sent.header, jax.device_put(sent.arrays, self.shardings(sent.header)))

    @hands_over
    def write(self, pages: KVPages, request: RequestPages, sent: SentRequest) -> KVPages:
        """Pages with the request's entries. Donates `pages`; those not in the tables are untouched.

        Raises:
            ValueError: other layers, other weights, tokens that were not sent, not a table for each group, one of too
                few columns, or of a data rank that there is not. The pages are untouched.
        """
        self.check(sent.header)
        num_data = self._placement.num_data
        check_tables(self._config, request, num_data)
        if request.first < sent.header.first or request.stop != sent.header.stop:
            raise ValueError(
                f"expected tokens of {sent.header.first} to {sent.header.stop}, got {request.first} to {request.stop}"
            )
        arrays = dict(zip((layer.name for layer in sent.header.layers), sent.arrays, strict=True))
        work = []
        for batch, received in self._received(request, sent.header):
            page_ids = padded_ids(received.page_ids, request.rank, num_data)
            places = np.full((page_ids.shape[1], batch.entries_per_page), NOT_SENT, np.int32)
            places[: len(received.places)] = received.places
            entries = tuple(arrays[layer.name] for layer in batch.layers)
            work.append((batch.layers, entries, page_ids, places.reshape(-1)))
        for layers, entries, page_ids, flat in work:
            pages = write_entries(pages, layers, entries, page_ids, flat)
        return pages

    def num_lacking(self, request: RequestPages, header: SentHeader) -> tuple[int, ...]:
        """Per group the first tokens of the request of which its pages lack some; 0: they lack none.

        A sender with smaller pages has released more of what left a window. Pages that lack tokens are right for the
        request, and must not become hits (`KVCacheManager.leave_unregistered`).
        """
        counts = [0] * len(self._config.kv_cache_groups)
        for batch, received in self._received(request, header):
            counts[batch.group_id] = max(counts[batch.group_id], received.num_lacking * batch.spec.tokens_per_state)
        return tuple(counts)

    def _received(self, request: RequestPages, header: SentHeader) -> Iterator[tuple[Batch, ReceivedPages]]:
        """Layers that are written alike, and what goes into their pages."""
        headers = {layer.name: layer for layer in header.layers}

        def columns_sent(layer: LayerPages) -> Hashable:
            return headers[layer.name].columns, headers[layer.name].entries_per_page

        for batch in batches(self._config, tuple(self._layers.values()), columns_sent):
            one = headers[batch.layers[0].name]
            yield (
                batch,
                received_pages(
                    request.tables[batch.group_id],
                    batch.entries_per_page,
                    *request.entries(batch.spec),
                    np.array(one.columns, np.int64),
                    one.entries_per_page,
                ),
            )


class Batch(NamedTuple):
    """Layers of one group whose pages hold equally many entries: read and written by one program."""

    group_id: int
    entries_per_page: int
    spec: KVCacheSpec
    layers: tuple[LayerPages, ...]


def batches(
    kv_cache_config: KVCacheConfig,
    layers: Sequence[LayerPages],
    apart: Callable[[LayerPages], Hashable] = lambda layer: None,
) -> Iterator[Batch]:
    """All layers, by group and entries of a page; those of which `apart` says different things apart."""
    found = defaultdict(list)
    for layer in layers:
        spec = kv_cache_config.kv_cache_groups[layer.group_id].spec_of(layer.column)
        found[layer.group_id, layer.entries_per_page, spec.tokens_per_state, apart(layer)].append((layer, spec))
    for (group_id, entries_per_page, *_), members in found.items():
        yield Batch(group_id, entries_per_page, members[0][1], tuple(layer for layer, _ in members))


def _header(layer: LayerPages, sent: SentPages, num_entries: int) -> LayerHeader:
    return LayerHeader(
        layer.name,
        layer.entry_shapes,
        layer.dtypes,
        num_entries,
        layer.entries_per_page,
        layer.has_heads,
        tuple(sent.columns.tolist()),
    )

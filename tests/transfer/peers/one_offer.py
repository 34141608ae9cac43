"""A server with an offer of a small request, and a client that has a place for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import chex
import numpy as np

from kvjax.core import Request
from kvjax.device import Placement
from kvjax.transfer import PageClient, PageReader, PageServer, PageWriter, RequestPages, SentRequest, TransferKey
from tests.transfer.worlds import Dense, config_of, nan_pages, specs, tables, written

NUM_TOKENS = 11


@dataclass(frozen=True)
class OneOffer:
    """Both sides in this process."""

    key: TransferKey
    server: PageServer
    client: PageClient
    writer: PageWriter
    sent: SentRequest
    request: Request

    def offer(self) -> bytes:
        """The ticket of a new offer of the same entries."""
        return self.server.offer(self.sent, self.request)

    def assert_serves(self, timeout_s: float = 20.0) -> None:
        """A pull of a new offer brings what was sent."""
        arrival = self.client.pull(self.client.read(self.offer()), self.writer)
        chex.assert_trees_all_equal(arrival.wait(timeout_s).arrays, self.sent.arrays)


@contextmanager
def one_offer(key: TransferKey | None = None, timeout_s: float = 60.0, **server_options: Any) -> Iterator[OneOffer]:
    key = TransferKey.generate() if key is None else key
    layers = specs(4)
    config, placement = config_of(layers, "cpu"), Placement.create()
    request = RequestPages(tables(layers, NUM_TOKENS, 1), 0, NUM_TOKENS)
    pages = written(config, nan_pages(config), request, Dense.random(layers, NUM_TOKENS, 0), range(NUM_TOKENS))
    sent = PageReader(config, placement, weights_version="7").read(pages, request)
    server, client = PageServer(key, **server_options), PageClient(key, timeout_s=timeout_s)
    writer = PageWriter(config, placement, weights_version="7")
    try:
        yield OneOffer(key, server, client, writer, sent, Request("a", np.arange(NUM_TOKENS)))
    finally:
        client.close()
        server.close()

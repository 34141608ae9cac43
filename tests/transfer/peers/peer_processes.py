"""One side of a transfer, as a process: `peer_processes.py send|receive`, devices by XLA_FLAGS, the key by environment.

The sender prints two tickets, a line each, and waits to be killed. The receiver reads them, pulls the first one, and
compares the pages with those of the same tokens written here. It prints `READY`, waits for a line, and pulls the second
from nobody.
"""

from __future__ import annotations

import sys

import chex
import jax
import numpy as np
import pytest

from kvjax.core import Request
from kvjax.device import Placement
from kvjax.errors import TransferError
from kvjax.transfer import PageClient, PageReader, PageServer, PageWriter, RequestPages, TransferKey
from tests.transfer.worlds import Dense, config_of, nan_pages, specs, tables, written

NUM_TOKENS = 13  # the window's sender keeps what the receiver does: from token 4 on
READY = "ready"


def send() -> None:
    placement = Placement.over_heads(len(jax.devices()))
    layers = specs(4)
    config = config_of(layers, "cpu")
    request = RequestPages(tables(layers, NUM_TOKENS, 1), 0, NUM_TOKENS)
    dense = Dense.random(layers, NUM_TOKENS, 0)
    pages = written(config, nan_pages(config, placement), request, dense, range(NUM_TOKENS))
    sent = PageReader(config, placement, weights_version="7").read(pages, request)
    server = PageServer(TransferKey.from_environment())
    for _ in range(2):
        print(server.offer(sent, Request("a", np.arange(NUM_TOKENS))).hex(), flush=True)
    sys.stdin.read()


def receive() -> None:
    placement = Placement.over_heads(len(jax.devices()))
    layers = specs(8)
    config = config_of(layers, "tpu")
    request = RequestPages(tables(layers, NUM_TOKENS, 2), 0, NUM_TOKENS)
    writer = PageWriter(config, placement, weights_version="7")
    client = PageClient(TransferKey.from_environment())
    tickets = [client.read(bytes.fromhex(input())) for _ in range(2)]
    assert client.matches(tickets[0], Request("b", np.arange(NUM_TOKENS + 1)))
    pages = writer.write(nan_pages(config, placement), request, client.pull(tickets[0], writer).wait())
    dense = Dense.random(layers, NUM_TOKENS, 0)
    expected = written(config, nan_pages(config), request, dense, range(NUM_TOKENS))
    chex.assert_trees_all_equal(jax.device_get(pages.pools[:1]), jax.device_get(expected.pools[:1]))
    chex.assert_trees_all_equal(jax.device_get(pages.pools[2:]), jax.device_get(expected.pools[2:]))
    print(READY, flush=True)
    input()
    with pytest.raises(TransferError, match="tokens 0 to 13 did not arrive: 127"):
        client.pull(tickets[1], writer).wait(20)


if __name__ == "__main__":
    {"send": send, "receive": receive}[sys.argv[1]]()

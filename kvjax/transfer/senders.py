"""The processes of a prefill engine that have a request's entries: each holds its own share under one id.

Flow:    SentRequest + Request -> [Senders.offer] -> PageServer.hold here, and a ticket with the addresses of all

Addresses are exchanged once. The id of an offer follows from the key, a random name of the group and a count, so that
every process knows it, and the whole ticket, without asking.
"""

from __future__ import annotations

import json
import secrets

from kvjax.core import Request
from kvjax.device import Placement
from kvjax.device.mesh.processes import ProcessBoard, spans_processes
from kvjax.transfer.head_homes import senders_of
from kvjax.transfer.head_part import HeadPart
from kvjax.transfer.peers.page_server import PageServer
from kvjax.transfer.peers.ticket import Source
from kvjax.transfer.sent_request import SentRequest


class Senders:
    """One process's side."""

    def __init__(self, server: PageServer, placement: Placement) -> None:
        """Tells the other processes of the placement where this one serves.

        Raises:
            NotImplementedError: the processes do not split the heads evenly.
        """
        self._server, self._index = server, 0
        self._addresses = [""]  # of each process; alone it needs none
        self._senders: list[tuple[int, ...]] = [(0,)]  # of each data rank
        self._name, self._num_offers = b"", 0
        if spans_processes(placement.mesh):
            self._senders = [senders_of(placement, rank) for rank in range(placement.num_data)]
            board = ProcessBoard()
            own = json.dumps([server.address, secrets.token_hex(16)])
            told = [json.loads(text) for text in board.exchange("senders", own)]
            self._index, self._addresses = board.index, [address for address, _ in told]
            self._name = bytes.fromhex(told[0][1])

    def offer(self, sent: SentRequest, request: Request, rank: int) -> bytes:
        """Holds this process's share of a request's entries; the ticket for those of all."""
        if not self._name:
            return self._server.offer(sent, request)
        self._num_offers += 1
        offer_id = self._server.offer_id(self._name + self._num_offers.to_bytes(8, "big"))
        senders = self._senders[rank]
        ticket = self._server.ticket([Source(self._addresses[one], offer_id) for one in senders], sent.header, request)
        if self._index in senders:
            place = senders.index(self._index)
            self._server.hold(sent, offer_id, HeadPart(place, place + 1, len(senders)))
        return ticket


__all__ = ["Senders"]

"""KV of requests sent between deployments of other page sizes, layouts and tensor parallelism.

Flow:    pages of a prefill deployment -> [kvjax.transfer] -> pages of a decode deployment
Source:  ARCHITECTURE.md, "Prefill and decode apart"
"""

from __future__ import annotations

from kvjax.transfer.decode_connector import DecodeConnector
from kvjax.transfer.peers.arrival import Arrival
from kvjax.transfer.peers.key import TransferKey
from kvjax.transfer.peers.page_client import PageClient
from kvjax.transfer.peers.page_server import PageServer
from kvjax.transfer.peers.ticket import Source, Ticket
from kvjax.transfer.prefill_connector import PrefillConnector
from kvjax.transfer.request_span import RequestPages, request_pages
from kvjax.transfer.sent_request import LayerHeader, PageReader, PageWriter, SentHeader, SentRequest

__all__ = [
    "Arrival",
    "DecodeConnector",
    "LayerHeader",
    "PageClient",
    "PageReader",
    "PageServer",
    "PageWriter",
    "PrefillConnector",
    "RequestPages",
    "SentHeader",
    "SentRequest",
    "Source",
    "Ticket",
    "TransferKey",
    "request_pages",
]

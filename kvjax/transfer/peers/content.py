"""What KV is of: a code of a request's tokens and of all beside them that decides their KV.

Flow:    Request -> [content_code] -> Ticket, which a decode engine compares with the request that presents it
Source:  extra keys of block hashes (kvjax/core/hashing/extra_keys.py): adapter, items, salt, embeddings

The weights have a text of their own in the header, since engines may count their versions apart.
"""

from __future__ import annotations

import hashlib

import cbor2
import numpy as np

from kvjax.core import Request
from kvjax.core.hashing.extra_keys import ExtraKeys
from kvjax.transfer.peers.key import TransferKey


def content_code(key: TransferKey, request: Request, stop: int) -> bytes:
    """32 bytes that stand for the request's first `stop` tokens; without the key they tell nothing of these."""
    beside = ExtraKeys(
        mm_features=request.mm_features,
        lora=request.lora,
        cache_salt=request.cache_salt,
        prompt_embeds=request.prompt_embeds,
    ).of_block(0, stop)
    tokens = hashlib.sha256(np.ascontiguousarray(request.token_ids[:stop], "<i4")).digest()
    return key.sign("content", cbor2.dumps([stop, tokens, beside]))


__all__ = ["content_code"]

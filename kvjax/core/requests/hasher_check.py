"""Whether a request's hasher fits a manager, and warnings where its hashes mean nothing to others.

Flow:    KVCacheManager -> [HasherCheck] -> ValueError, warning
"""

from __future__ import annotations

import warnings

from kvjax.core.hashing.block_hash import BlockHasher
from kvjax.core.requests.request import Request


class HasherCheck:
    """The rule of one manager. Each warning is given once; the hasher seen last is not checked again."""

    def __init__(self, hash_block_size: int, publishes_hashes: bool) -> None:
        self._hash_block_size = hash_block_size
        self._publishes_hashes = publishes_hashes
        self._first: BlockHasher | None = None
        self._checked: BlockHasher | None = None
        self._warned_of_seed = False
        self._warned_of_difference = False

    def check_hasher(self, request: Request) -> None:
        """Warns where the request can share no blocks with earlier ones, or its published hashes mean nothing.

        Raises:
            ValueError: the request was hashed with another block size.
        """
        hasher = request.block_hasher
        if hasher is None or hasher is self._checked:
            return
        if hasher.block_size != self._hash_block_size:
            raise ValueError(
                f"request {request.request_id!r}: expected a block_hasher of hash_block_size = {self._hash_block_size} "
                f"tokens, got {hasher.block_size}"
            )
        if self._publishes_hashes and hasher.is_cbor and not hasher.has_seed and not self._warned_of_seed:
            self._warned_of_seed = True
            warnings.warn(
                f"KV events publish {hasher.algorithm} hashes that no other process can compute: give the BlockHasher "
                "a seed, or set PYTHONHASHSEED",
                stacklevel=4,
            )
        if self._first is None:
            self._first = hasher
        if not hasher.shares_with(self._first) and not self._warned_of_difference:
            self._warned_of_difference = True
            warnings.warn(
                f"request {request.request_id!r}: expected a block_hasher of the algorithm and seed of earlier "
                f"requests ({self._first.algorithm}), got another ({hasher.algorithm}); the two share no blocks. Give "
                "all requests one BlockHasher",
                stacklevel=4,
            )
        self._checked = hasher

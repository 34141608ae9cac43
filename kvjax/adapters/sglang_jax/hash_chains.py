"""Hashes of prompts that wait: sglang-jax's scheduler matches each again in every round, and again as it is admitted.

Flow:    PrefixCache.match_prefix, _cached -> [HashChains] -> BlockHasher, for what was not asked lately
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import final

import numpy as np

from kvjax.core.hashing.block_hash import BlockHash, BlockHasher
from kvjax.core.hashing.extra_keys import ExtraKeys

TOKEN_BYTES, HASH_BYTES = 8, 64  # of a kept token, in a tuple, and of a kept hash, in a list with its object


@final
class HashChains:
    """The least recently asked prompts go where all together take more than `most_bytes`.

    Asking again costs some 20 ns a token, asking anew about 1 us a page.
    """

    def __init__(self, hasher: BlockHasher, most_bytes: int = 64 << 20) -> None:
        self._hasher, self._most_bytes = hasher, most_bytes
        self._num_bytes = 0
        self._chains: OrderedDict[tuple[str | None, tuple[int, ...]], list[BlockHash]] = OrderedDict()

    def of(self, token_ids: Sequence[int], namespace: str | None) -> list[BlockHash]:
        """Hashes of the full pages; nobody writes to the list."""
        key = self._key(token_ids, namespace)
        found = self._chains.get(key)
        if found is not None:
            self._chains.move_to_end(key)
            return found
        hashes: list[BlockHash] = []
        self._hasher.extend(hashes, np.array(key[1], np.int64), extra_keys_of(namespace))
        self._chains[key] = hashes
        self._num_bytes += _bytes_of(key[1], hashes)
        while self._num_bytes > self._most_bytes:
            (_, tokens), dropped = self._chains.popitem(last=False)
            self._num_bytes -= _bytes_of(tokens, dropped)
        return hashes

    def extend(
        self, hashes: Sequence[BlockHash], token_ids: Sequence[int], namespace: str | None, asked: Sequence[int]
    ) -> list[BlockHash]:
        """Hashes of the full pages, of which `hashes` are the first; `asked` may be tokens that `of` was asked lately.

        `asked` and `token_ids` begin alike: the shorter is a prefix of the longer.
        """
        known = self._chains.get(self._key(asked, namespace), ())
        count = len(token_ids) // self._hasher.block_size
        made = list(known[:count] if len(known) > len(hashes) else hashes)
        self._hasher.extend(made, np.asarray(token_ids, np.int64), extra_keys_of(namespace))
        return made

    def _key(self, token_ids: Sequence[int], namespace: str | None) -> tuple[str | None, tuple[int, ...]]:
        size = self._hasher.block_size
        return namespace, tuple(token_ids[: len(token_ids) // size * size])


def extra_keys_of(namespace: str | None) -> ExtraKeys | None:
    """What a namespace adds to the hash of a first page."""
    return None if namespace is None else ExtraKeys(cache_salt=str(namespace) or "''")


def _bytes_of(tokens: tuple[int, ...], hashes: list[BlockHash]) -> int:
    return len(tokens) * TOKEN_BYTES + len(hashes) * HASH_BYTES

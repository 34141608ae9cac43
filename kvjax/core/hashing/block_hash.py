"""Chained hashes of full blocks of tokens, byte-compatible with vLLM's four algorithms.

Flow:    Request token ids -> [BlockHasher] -> Request.block_hashes -> BlockPool, KV events
Source:  vLLM v1/core/kv_cache_utils.py and utils/hashing.py; defaults: ARCHITECTURE.md, "Hashing"

    hash of block i = H(encode((hash of block i - 1, tokens of block i, extra keys of block i)))

    algorithm    encode          H
    sha256       pickle          SHA-256   32 bytes
    sha256_cbor  canonical CBOR  SHA-256   32 bytes
    xxhash       pickle          XXH3-128  16 bytes
    xxhash_cbor  canonical CBOR  XXH3-128  16 bytes

The parent of the first block is NONE_HASH = H(encode(seed text)); without a seed text it is 32 random bytes, which all
hashers of a process share, and then hashes mean nothing to another process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from itertools import chain
from typing import Any, NewType, overload

import numpy as np
from xxhash import xxh3_128_digest

from kvjax.core.hashing.cbor_encoding import CborEncoding
from kvjax.core.hashing.extra_keys import DEFAULT_EXTRA_KEY_STYLE, EXTRA_KEY_STYLES, ExtraKeys
from kvjax.core.hashing.pickle_encoding import PickleEncoding

BlockHash = NewType("BlockHash", bytes)
BlockHashWithGroupId = NewType("BlockHashWithGroupId", bytes)

GROUP_ID_BYTES = 4
SHA256_BYTES = 32
XXH3_128_BYTES = 16
ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")


def make_block_hash_with_group_id(block_hash: BlockHash, group_id: int) -> BlockHashWithGroupId:
    """The hash followed by the group id as 4 big-endian bytes."""
    return BlockHashWithGroupId(block_hash + group_id.to_bytes(GROUP_ID_BYTES, "big"))


def get_block_hash(key: BlockHashWithGroupId) -> BlockHash:
    """The hash of a packed key."""
    return BlockHash(key[:-GROUP_ID_BYTES])


def get_group_id(key: BlockHashWithGroupId) -> int:
    """The group id of a packed key."""
    return int.from_bytes(key[-GROUP_ID_BYTES:], "big")


@cache
def seedless_none_hash() -> BlockHash:
    """NONE_HASH of every hasher of this process that has no seed."""
    return BlockHash(os.urandom(SHA256_BYTES))


@dataclass(frozen=True)
class BlockHasher:
    """An algorithm, a block size and a seed. A value: equal hashers give equal hashes; costs about 1 us a block."""

    block_size: int  # tokens of a hash
    algorithm: str = "sha256_cbor"  # one of ALGORITHMS
    seed: str | None = field(default=None, kw_only=True, compare=False)  # None: the text of PYTHONHASHSEED, if set
    extra_key_style: str = field(default=DEFAULT_EXTRA_KEY_STYLE, kw_only=True)  # one of EXTRA_KEY_STYLES
    none_hash: BlockHash = field(init=False)
    has_seed: bool = field(init=False, compare=False)  # whether another process can compute the same hashes
    digest_bytes: int = field(init=False, compare=False)  # of a hash; NONE_HASH may have another length
    _encoding: CborEncoding | PickleEncoding = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"expected block_size >= 1, got {self.block_size}")
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"expected a hash algorithm of {', '.join(ALGORITHMS)}, got {self.algorithm!r}")
        if self.extra_key_style not in EXTRA_KEY_STYLES:
            raise ValueError(
                f"expected an extra key style of {', '.join(EXTRA_KEY_STYLES)}, got {self.extra_key_style!r}"
            )
        if self.seed is not None and not isinstance(self.seed, str):
            raise ValueError(f"expected seed as text (a number hashes unlike its text), got {self.seed!r}")
        encoding = CborEncoding() if self.algorithm.endswith("_cbor") else PickleEncoding()
        seed = os.environ.get("PYTHONHASHSEED") if self.seed is None else self.seed
        digest_bytes = SHA256_BYTES if self.algorithm.startswith("sha256") else XXH3_128_BYTES
        object.__setattr__(self, "_encoding", encoding)
        object.__setattr__(self, "digest_bytes", digest_bytes)
        object.__setattr__(self, "has_seed", seed is not None)
        none_hash = seedless_none_hash() if seed is None else self._digest(encoding.dumps(seed))
        object.__setattr__(self, "none_hash", none_hash)

    @classmethod
    def with_none_hash(
        cls, block_size: int, algorithm: str, extra_key_style: str, none_hash: bytes, has_seed: bool
    ) -> BlockHasher:
        """A hasher that goes on with the NONE_HASH of another, whose seed nobody knows."""
        hasher = cls(block_size, algorithm, seed="", extra_key_style=extra_key_style)
        object.__setattr__(hasher, "none_hash", none_hash)
        object.__setattr__(hasher, "has_seed", has_seed)
        return hasher

    @property
    def is_cbor(self) -> bool:
        """Whether hashes are meant to be computed by other programs too (canonical CBOR, not pickle)."""
        return self.algorithm.endswith("_cbor")

    def shares_with(self, other: BlockHasher) -> bool:
        """Whether equal blocks without extra keys get equal hashes from both."""
        return (self.block_size, self.algorithm, self.none_hash) == (other.block_size, other.algorithm, other.none_hash)

    def hash_tokens(
        self,
        token_ids: np.ndarray,  # integer[num_tokens]
        parent: BlockHash | None = None,
        extra_keys: Sequence[tuple[Any, ...] | None] | None = None,
    ) -> list[BlockHash]:
        """Hashes of all full blocks of `token_ids`, chained on `parent` (None: the first block of a sequence).

        `extra_keys` has one entry for every full block; None if no block has any.

        Raises:
            ValueError: `token_ids` are not a row of integers >= 0, or `extra_keys` is not one entry per full block.
        """
        blocks = self._full_blocks(token_ids)
        if extra_keys is not None and len(extra_keys) != len(blocks):
            raise ValueError(f"expected extra_keys for {len(blocks)} full blocks, got {len(extra_keys)}")
        return self._chain(blocks, parent or self.none_hash, extra_keys)

    def hash_blocks(
        self,
        blocks: np.ndarray,  # integer[num_blocks, block_size], not negative
        parents: Sequence[BlockHash],
        extra_keys: Sequence[tuple[Any, ...] | None] | None = None,
    ) -> list[BlockHash]:
        """Hashes of blocks that are independent of each other, as one step of many requests fills them."""
        tails = self._tails(blocks, extra_keys)
        if tails is None:
            keys = [None] * len(blocks) if extra_keys is None else extra_keys
            return [self._hash_plain(*block) for block in zip(parents, blocks.tolist(), keys, strict=True)]
        heads = self._encoding.heads(self.digest_bytes, tails)
        if set(map(len, parents)) != {self.digest_bytes}:  # NONE_HASH of xxhash without a seed
            heads = [self._encoding.head(len(parent), tail) for parent, tail in zip(parents, tails, strict=True)]
        hashes: list[BlockHash] = []
        self._append_hashes(hashes, heads, parents, tails)
        return hashes

    def extend(
        self,
        block_hashes: list[BlockHash],
        token_ids: np.ndarray,  # integer[num_tokens], of which block_hashes covers the first blocks
        extra_keys: ExtraKeys | None = None,
    ) -> int:
        """Appends the hashes of the full blocks that `block_hashes` lacks, and returns their number."""
        size = self.block_size
        first, last = len(block_hashes), len(token_ids) // size
        if first >= last:
            return 0
        keys = (
            None if extra_keys is None else [extra_keys.of_block(i * size, (i + 1) * size) for i in range(first, last)]
        )
        parent = block_hashes[-1] if block_hashes else None
        block_hashes += self.hash_tokens(token_ids[first * size : last * size], parent, keys)
        return last - first

    def _full_blocks(self, token_ids: np.ndarray) -> np.ndarray:
        tokens = np.asarray(token_ids)
        if tokens.ndim != 1 or (tokens.dtype.kind not in "iu" and tokens.size):
            raise ValueError(f"expected a row of integer tokens, got {tokens.dtype}{list(tokens.shape)}")
        num_blocks = tokens.size // self.block_size
        blocks = tokens[: num_blocks * self.block_size].reshape(num_blocks, self.block_size)
        if blocks.size and int(blocks.min()) < 0:
            raise ValueError(f"expected tokens >= 0, got {int(blocks.min())}")
        return blocks

    def _chain(
        self, blocks: np.ndarray, parent: BlockHash, extra_keys: Sequence[tuple[Any, ...] | None] | None
    ) -> list[BlockHash]:
        if not len(blocks):
            return []
        tails = self._tails(blocks, extra_keys)
        hashes: list[BlockHash] = []
        if tails is None:
            keys = [None] * len(blocks) if extra_keys is None else extra_keys
            for block, key in zip(blocks.tolist(), keys, strict=True):
                parent = self._hash_plain(parent, block, key)
                hashes.append(parent)
            return hashes
        first_head = self._encoding.head(len(parent), tails[0])
        heads = chain((first_head,), self._encoding.heads(self.digest_bytes, tails[1:]))
        self._append_hashes(hashes, heads, chain((parent,), hashes), tails)  # each hash is the parent of the next
        return hashes

    def _tails(self, blocks: np.ndarray, extra_keys: Sequence[tuple[Any, ...] | None] | None) -> Sequence[bytes] | None:
        """Bytes after the parent hash, per block. None: the messages are encoded whole, one by one."""
        return self._encoding.tails(blocks, extra_keys) if blocks.size > self._encoding.short_tokens else None

    def _hash_plain(self, parent: BlockHash, block: list[int], extra_keys: tuple[Any, ...] | None) -> BlockHash:
        return self._digest(self._encoding.dumps((parent, tuple(block), extra_keys)))

    def _digest(self, message: bytes) -> Any:
        return sha256(message).digest() if self.digest_bytes == SHA256_BYTES else xxh3_128_digest(message)

    @property
    def _append_hashes(self) -> Callable[[list[Any], Iterable[bytes], Iterable[bytes], Iterable[bytes]], None]:
        return _append_sha256 if self.digest_bytes == SHA256_BYTES else _append_xxh3_128


class _BegunStates(dict[bytes, Callable[[], Any]]):
    """Per head, what copies the SHA-256 state after it: a copy costs a fifth less than a new state."""

    def __missing__(self, head: bytes) -> Callable[[], Any]:
        self[head] = copy = sha256(head).copy
        return copy


def _append_sha256(hashes: list[Any], heads: Iterable[bytes], parents: Iterable[bytes], tails: Iterable[bytes]) -> None:
    """Appends the hash of every `head + parent + tail`; `parents` may iterate over `hashes` itself."""
    append = hashes.append
    for begin, parent, tail in zip(map(_BegunStates().__getitem__, heads), parents, tails, strict=False):
        state = begin()
        state.update(parent)
        state.update(tail)
        append(state.digest())


def _append_xxh3_128(
    hashes: list[Any], heads: Iterable[bytes], parents: Iterable[bytes], tails: Iterable[bytes]
) -> None:
    """As `_append_sha256`; here joining the parts is cheaper."""
    append = hashes.append
    for head, parent, tail in zip(heads, parents, tails, strict=False):
        append(xxh3_128_digest(head + parent + tail))


class BlockHashListWithBlockSize(Sequence[BlockHash]):
    """Hashes of coarse blocks as a live view of a list of fine ones.

    `concat`: the fine hashes of a coarse block joined; `last`: its last fine hash, since the chain covers the rest.
    """

    __slots__ = ("_concat", "_hashes", "_scale")

    def __init__(
        self, block_hashes: Sequence[BlockHash], hash_block_size: int, target_block_size: int, mode: str = "concat"
    ):
        if hash_block_size < 1 or target_block_size < 1 or target_block_size % hash_block_size:
            raise ValueError(f"expected a multiple of hash_block_size {hash_block_size}, got {target_block_size}")
        if mode not in ("concat", "last"):
            raise ValueError(f"expected mode concat or last, got {mode!r}")
        self._hashes = block_hashes
        self._scale = target_block_size // hash_block_size
        self._concat = mode == "concat"

    def __len__(self) -> int:
        return len(self._hashes) // self._scale

    @overload
    def __getitem__(self, index: int) -> BlockHash: ...
    @overload
    def __getitem__(self, index: slice) -> list[BlockHash]: ...
    def __getitem__(self, index: int | slice) -> BlockHash | list[BlockHash]:
        if isinstance(index, slice):
            return [self._at(i) for i in range(*index.indices(len(self)))]
        size = len(self)
        if not -size <= index < size:
            raise IndexError(f"expected an index into {size} block hashes, got {index}")
        return self._at(index % size)

    def __iter__(self) -> Iterator[BlockHash]:
        return map(self._at, range(len(self)))

    def _at(self, index: int) -> BlockHash:
        end = (index + 1) * self._scale
        if self._concat:
            joined: Any = b"".join(self._hashes[end - self._scale : end])
            return joined
        return self._hashes[end - 1]

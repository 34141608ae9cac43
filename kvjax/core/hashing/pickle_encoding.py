"""Pickles of `(parent_hash, token_ids, extra_keys)` for many blocks at once, byte for byte `pickle.dumps`'s.

Flow:    token_ids[blocks, block_size] -> [PickleEncoding] -> head, tail; the hashed message is head + parent + tail
Source:  CPython Lib/pickletools.py (opcodes, protocol 5); message of vLLM v1/core/kv_cache_utils.py

The message without extra keys, for four tokens or more (fewer have no mark and another opcode):

    PROTO 5 | FRAME length | SHORT_BINBYTES 32 parent MEMOIZE | MARK token ... TUPLE MEMOIZE | NONE TUPLE3 MEMOIZE STOP
    ------- head ------------------------------------ ------  ------------------ tail -----------------------------

A token is BININT1, BININT2 or BININT (1, 2 or 4 little-endian bytes). What these do not cover is
left to `pickle.dumps`, with a stand-in for the parent that is cut out afterwards. Extra keys above all: pickle writes
an object that it has met before as a reference, so the bytes depend on identities. A message that exceeds one frame
cannot be cut so.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from kvjax.core.hashing.byte_packing import pack_blocks

MAX_WORD_TOKEN = 2**31 - 1  # BININT is signed
MAX_TAIL_BYTES = 60_000  # a frame ends at 65,536 bytes
MIN_MARKED_TOKENS = 4
MAX_PACKED_TOKENS = 10_000  # of at most 5 bytes each: within a frame
_OPEN = b"\x94("  # MEMOIZE of the parent, MARK
_CLOSE = b"t\x94N\x87\x94."  # TUPLE MEMOIZE NONE TUPLE3 MEMOIZE STOP
_BININT1 = ord("K")  # BININT2 is "M", two above it, and BININT is "J", one below it


class PickleEncoding:
    """Pickled messages of blocks. Stateless; `tails` costs a few nanoseconds a token."""

    short_tokens: ClassVar[int] = 512  # up to here `dumps` of one message after the other is faster than `tails`

    def dumps(self, value: Any) -> bytes:
        """One value, as vLLM's `sha256` and `xxhash` functions encode it."""
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)

    def head(self, parent_len: int, tail: bytes) -> bytes:
        """Bytes before a parent hash of `parent_len` bytes, when the bytes after it are `tail`."""
        return self._head(parent_len, len(tail))

    def heads(self, parent_len: int, tails: Sequence[bytes]) -> Iterable[bytes]:
        """`head` of every tail; tails of one length share it."""
        tail_lens = list(map(len, tails))
        heads = {tail_len: self._head(parent_len, tail_len) for tail_len in set(tail_lens)}
        return map(heads.__getitem__, tail_lens)

    def tails(
        self,
        token_ids: np.ndarray,  # integer[num_blocks, block_size], not negative
        extra_keys: Sequence[tuple[Any, ...] | None] | None = None,  # one per block; None: no block has any
    ) -> list[bytes] | None:
        """Bytes after the parent hash, per block. None if a message may exceed one frame."""
        packed = self._packs(token_ids)
        if packed and extra_keys is None:
            return pack_blocks(token_ids, _OPEN, _CLOSE, _code_tokens)
        tails = pack_blocks(token_ids, _OPEN, _CLOSE, _code_tokens) if packed else [b""] * len(token_ids)
        for i, keys in enumerate(extra_keys or [None] * len(token_ids)):
            if not packed or keys is not None:
                tails[i] = self._cut_tail(token_ids[i], keys)
        return tails if max(map(len, tails), default=0) <= MAX_TAIL_BYTES else None

    def _packs(self, token_ids: np.ndarray) -> bool:
        """Whether all blocks are of the packed form but for their extra keys."""
        if not token_ids.size or not MIN_MARKED_TOKENS <= token_ids.shape[1] <= MAX_PACKED_TOKENS:
            return False
        return token_ids.dtype.itemsize < 4 or int(token_ids.max()) <= MAX_WORD_TOKEN

    def _head(self, parent_len: int, tail_len: int) -> bytes:
        frame_len = 2 + parent_len + tail_len
        return b"\x80\x05\x95" + frame_len.to_bytes(8, "little") + b"C" + bytes((parent_len,))

    def _cut_tail(self, block: np.ndarray, keys: tuple[Any, ...] | None) -> bytes:
        stand_in = bytes(16)
        message = self.dumps((stand_in, tuple(block.tolist()), keys))
        return message[len(self.head(len(stand_in), b"")) + len(stand_in) :]


def _code_tokens(tokens: np.ndarray, codes: np.ndarray, lengths: np.ndarray) -> None:
    """Writes the code and the length of every token."""
    above_255 = (tokens > 0xFF).view(np.uint8)
    above_65535 = (tokens > 0xFFFF).view(np.uint8)
    np.add(above_65535, above_65535, out=lengths)
    lengths += above_255
    lengths += 2  # opcode and 1, 2 or 4 bytes
    codes[...] = tokens
    codes <<= 8
    codes |= _BININT1 + 2 * above_255 - 3 * above_65535

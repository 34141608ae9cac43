"""The baseline of the cases: one Python object per block, one call per request, a loop over its groups.

A pool has an OrderedDict as free list and a dict as hash index. A recurrent state is a window of two tokens. Hashes are
random, since nothing is shared; block by block, hashing encodes with `cbor2.dumps` or `pickle.dumps`, then hashlib or
xxhash.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import cbor2
import numpy as np
import xxhash

from bench_host_cases.kvjax_side import random_tokens
from bench_host_cases.shapes import BLOCK_SIZE, VOCABULARY, Shape, window_of
from kvjax.core import BlockHasher, KVCacheSpec

SEED = "bench"


class PlainBlock:
    """One block."""

    __slots__ = ("block_hash", "block_id", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None


class PlainPool:
    """A block at a time, checks included."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [PlainBlock(block_id) for block_id in range(num_blocks)]
        self.free = OrderedDict.fromkeys(range(1, num_blocks))
        self.index: dict[bytes, int] = {}

    def get_new_blocks(self, count: int) -> list[PlainBlock]:
        if count > len(self.free):
            raise ValueError(f"needs {count} blocks, {len(self.free)} free")
        taken = []
        for _ in range(count):
            block = self.blocks[self.free.popitem(last=False)[0]]
            if block.block_hash is not None:
                del self.index[block.block_hash]
                block.block_hash = None
            block.ref_count += 1
            taken.append(block)
        return taken

    def register(self, blocks: list[PlainBlock], hashes: list[bytes]) -> None:
        for block, block_hash in zip(blocks, hashes, strict=True):
            block.block_hash = block_hash
            self.index[block_hash] = block.block_id

    def free_blocks(self, blocks: list[PlainBlock]) -> None:
        for block in blocks:
            if block.ref_count < 1:
                raise ValueError(f"block {block.block_id} is free")
            block.ref_count -= 1
            if block.ref_count == 0:
                self.free[block.block_id] = None


@dataclass
class PlainRequest:
    """Tokens are only counted: every block's hash is known beforehand."""

    name: str
    num_tokens: int
    block_hashes: list[bytes]
    num_computed_tokens: int = 0


@dataclass
class PlainGroup:
    """Full attention, or a window of `window` tokens."""

    key: bytes  # keeps the groups' hashes apart
    block_size: int
    window: int | None = None
    tables: dict[str, list[PlainBlock | None]] = field(default_factory=dict)  # None: given back
    num_cached: dict[str, int] = field(default_factory=dict)


class PlainManager:
    """What a scheduler calls for each request of each step."""

    def __init__(self, num_blocks: int, groups: list[PlainGroup]) -> None:
        self.groups = groups
        self.pool = PlainPool(num_blocks)

    def allocate_slots(
        self, request: PlainRequest, num_new: int, num_hit: int = 0, hit: Sequence[PlainBlock] = ()
    ) -> list[list[PlainBlock]] | None:
        """None: does not fit. Hits are only looked up by the cases, never taken."""
        after = request.num_computed_tokens + num_hit + num_new
        for group in self.groups:
            self.release_skipped(group, request)
        tables = [group.tables.setdefault(request.name, []) for group in self.groups]
        needs = [
            max(-(-after // group.block_size) - len(table), 0) for group, table in zip(self.groups, tables, strict=True)
        ]
        if sum(needs) > len(self.pool.free):
            return None
        dealt = []
        for table, need in zip(tables, needs, strict=True):
            blocks = self.pool.get_new_blocks(need)
            table += blocks
            dealt.append(blocks)
        for group, table in zip(self.groups, tables, strict=True):
            full = min(after, request.num_tokens) // group.block_size
            for column in range(group.num_cached.get(request.name, 0), full):
                block = table[column]
                if block is not None:
                    self.pool.register([block], [request.block_hashes[column] + group.key])
            group.num_cached[request.name] = full
        return dealt

    def release_skipped(self, group: PlainGroup, request: PlainRequest) -> None:
        if group.window is None or request.name not in group.tables:
            return
        table = group.tables[request.name]
        released = []
        for column in range(max(request.num_computed_tokens - group.window + 1, 0) // group.block_size - 1, -1, -1):
            block = table[column]
            if block is None:
                break
            released.append(block)
            table[column] = None
        self.pool.free_blocks(released)

    def get_computed_blocks(self, request: PlainRequest) -> tuple[list[PlainBlock], int]:
        """Full attention only: the blocks, and their tokens."""
        hit = []
        for block_hash in request.block_hashes:
            block_id = self.pool.index.get(block_hash + self.groups[0].key)
            if block_id is None:
                break
            hit.append(self.pool.blocks[block_id])
        return hit, len(hit) * self.groups[0].block_size

    def free(self, request: PlainRequest) -> None:
        for group in self.groups:
            table = group.tables.pop(request.name)
            group.num_cached.pop(request.name)
            self.pool.free_blocks([block for block in reversed(table) if block is not None])


class PlainCrossManager(PlainManager):
    """One group of cross attention: `fixed_blocks` blocks from the first call on."""

    def __init__(self, num_blocks: int, fixed_blocks: int) -> None:
        super().__init__(num_blocks, [PlainGroup(b"\0", 1)])
        self.fixed_blocks = fixed_blocks

    def allocate_slots(
        self, request: PlainRequest, num_new: int, num_hit: int = 0, hit: Sequence[PlainBlock] = ()
    ) -> list[list[PlainBlock]] | None:
        [group] = self.groups
        table = group.tables.setdefault(request.name, [])
        group.num_cached.setdefault(request.name, 0)
        need = max(self.fixed_blocks - len(table), 0)
        if need > len(self.pool.free):
            return None
        blocks = self.pool.get_new_blocks(need)
        table += blocks
        return [blocks]


class PlainDecoding:
    """As `Decoding`, in the plain manager."""

    def __init__(self, shape: Shape, num_requests: int) -> None:
        num_blocks = sum(shape.group_blocks(num_requests))
        self.manager: PlainManager
        if shape.num_encoder_tokens:
            self.manager = PlainCrossManager(num_blocks, -(-shape.num_encoder_tokens // shape.specs[0].block_size))
        else:
            self.manager = PlainManager(num_blocks, plain_groups(shape.specs))
        columns = shape.most_tokens // shape.hash_block_size + 1
        self.requests = [
            PlainRequest(f"r{i}", shape.prompt + i % shape.spread, [os.urandom(32) for _ in range(columns)])
            for i in range(num_requests)
        ]
        for request in self.requests:
            self.manager.allocate_slots(request, request.num_tokens)
            request.num_computed_tokens = request.num_tokens
            for group in self.manager.groups:
                self.manager.release_skipped(group, request)
        self.step()

    def next_step(self) -> None:
        """A step appends and computes its tokens itself."""

    def step(self) -> None:
        for request in self.requests:
            request.num_tokens += 1
            self.manager.allocate_slots(request, 1)
            request.num_computed_tokens += 1

    def step_with_tokens(self) -> tuple[Callable[[], None], Callable[[], None]]:
        hasher = BlockHasher(BLOCK_SIZE, seed=SEED)
        rng = np.random.default_rng(0)
        tokens = [rng.integers(0, VOCABULARY, request.num_tokens).tolist() for request in self.requests]

        def step() -> None:
            for request, own in zip(self.requests, tokens, strict=True):
                own.append(7)
                if len(own) % BLOCK_SIZE == 0:
                    column = len(own) // BLOCK_SIZE - 1
                    parent = request.block_hashes[column - 1]
                    [request.block_hashes[column]] = hasher.hash_tokens(np.array(own[-BLOCK_SIZE:]), parent)
            self.step()

        return step, self.next_step

    def cache_free_blocks(self) -> None:
        pool = self.manager.pool
        blocks = pool.get_new_blocks(len(pool.free))
        pool.register(blocks, [os.urandom(32) for _ in blocks])
        pool.free_blocks(blocks)


def plain_groups(specs: Sequence[KVCacheSpec]) -> list[PlainGroup]:
    return [PlainGroup(bytes([i]), spec.block_size, window_of(spec)) for i, spec in enumerate(specs)]


class PlainSide:
    """As `Side`."""

    def manager(self, specs: Sequence[KVCacheSpec], num_blocks: int, max_model_len: int) -> PlainManager:
        return PlainManager(num_blocks, plain_groups(specs))

    def request(self, name: str, num_tokens: int) -> PlainRequest:
        return PlainRequest(name, num_tokens, [os.urandom(32) for _ in range(num_tokens // BLOCK_SIZE)])

    def decoding(self, shape: Shape, num_requests: int) -> PlainDecoding:
        return PlainDecoding(shape, num_requests)

    def decode_calls(self, manager: PlainManager, running: list[PlainRequest]) -> list[Callable[[], object]]:
        def decode() -> None:
            for request in running:
                request.num_tokens += 1
                manager.allocate_slots(request, 1)

        return [decode]

    def pool(self, num_blocks: int) -> PlainPool:
        return PlainPool(num_blocks)

    def register(self, pool: PlainPool, blocks: list[PlainBlock], hashes: list[bytes]) -> None:
        pool.register(blocks, hashes)

    def hashing(self, algorithm: str, num_tokens: int) -> Callable[[], list[bytes]]:
        tokens, hash_value = random_tokens("hashed", num_tokens).tolist(), plain_hash(algorithm)
        starts = range(0, num_tokens, BLOCK_SIZE)

        def hash_all() -> list[bytes]:
            hashes = [hash_value(SEED)]
            for start in starts:
                hashes.append(hash_value((hashes[-1], tuple(tokens[start : start + BLOCK_SIZE]), None)))
            return hashes[1:]

        return hash_all


def plain_hash(algorithm: str) -> Callable[[object], bytes]:
    """Hash of one value: encoding and digest."""
    pickled, cbor = (lambda value: pickle.dumps(value, pickle.HIGHEST_PROTOCOL)), cbor2.dumps
    encode = (lambda value: cbor(value, canonical=True)) if algorithm.endswith("_cbor") else pickled
    if algorithm.startswith("sha256"):
        return lambda value: hashlib.sha256(encode(value)).digest()
    return lambda value: xxhash.xxh3_128_digest(encode(value))

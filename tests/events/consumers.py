"""Two routers' indexes of cached blocks, fed by decoded batches: as Dynamo's and as llm-d's do it.

Both count how often a hash was stored and drop it when as many removals came; neither reads more than the events.

Source:  Dynamo lib/kv-router (radix tree, zmq_wire, EventDedupFilter); llm-d-kv-cache pkg/kvevents, pkg/kvcache/kvblock
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import cbor2
import numpy as np
from xxhash import xxh3_64_intdigest

from kvjax.events import wire

MAIN_KINDS = {"full_attention", "mla_attention", "sink_full_attention"}
DYNAMO_SEED = 1337
FNV_OFFSET, FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3


def chunks(values: Any, size: int) -> list[Any]:
    """The full ones."""
    return [values[start : start + size] for start in range(0, len(values) - size + 1, size)]


def extra_keys_of(event: wire.BlockStored) -> list[tuple | None]:
    return event.extra_keys or [None] * len(event.block_hashes)


# -- Dynamo ---------------------------------------------------------------------------------------------------------


def local_hash(tokens: Any) -> int:
    """Hash of a block's tokens alone; the tree gives the place."""
    return xxh3_64_intdigest(np.asarray(tokens, "<u4").tobytes(), DYNAMO_SEED)


@dataclass
class Node:
    workers: set[str] = field(default_factory=set)
    children: dict[Any, Node] = field(default_factory=dict)


@dataclass
class RadixIndex:
    """A tree of local block hashes; per worker the node of each block hash. Groups of main attention only."""

    root: Node = field(default_factory=Node)
    nodes: dict[str, dict[int, Node]] = field(default_factory=dict)
    references: dict[str, Counter[int]] = field(default_factory=dict)
    main_groups: set[tuple[str, int | None]] = field(default_factory=set)
    num_orphans: int = 0  # stored under a parent that the worker does not have

    def apply(self, worker: str, batch: wire.EventBatch) -> None:
        for event in batch.events:
            if isinstance(event, wire.BlockStored):
                if event.kv_cache_spec_kind in MAIN_KINDS:
                    self.main_groups.add((worker, event.group_idx))
                    self._store(worker, event)
            elif isinstance(event, wire.BlockRemoved):
                if (worker, event.group_idx) in self.main_groups:
                    self._remove(worker, event)
            else:
                self._clear(worker)

    def _store(self, worker: str, event: wire.BlockStored) -> None:
        hashes = [*event.block_hashes, *filter(None, [event.parent_block_hash])]
        assert all(isinstance(h, int) and 0 <= h < 1 << 64 for h in hashes)  # it reads no others
        assert len(set(hashes)) == len(hashes)  # it drops runs that repeat a hash
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        nodes = self.nodes.setdefault(worker, {})
        parent = self.root if event.parent_block_hash is None else nodes.get(event.parent_block_hash)
        if parent is None:
            self.num_orphans += 1
            return
        counts = self.references.setdefault(worker, Counter())
        runs = zip(event.block_hashes, chunks(event.token_ids, event.block_size), extra_keys_of(event), strict=True)
        for block_hash, tokens, extra in runs:
            parent = parent.children.setdefault((local_hash(tokens), extra), Node())
            parent.workers.add(worker)
            nodes[block_hash] = parent
            counts[block_hash] += 1

    def _remove(self, worker: str, event: wire.BlockRemoved) -> None:
        counts = self.references[worker]
        for block_hash in event.block_hashes:
            counts[block_hash] -= 1
            if not counts[block_hash]:
                del counts[block_hash]
                self.nodes[worker].pop(block_hash).workers.discard(worker)

    def _clear(self, worker: str) -> None:
        for node in self.nodes.pop(worker, {}).values():
            node.workers.discard(worker)
        self.references.pop(worker, None)

    def find_matches(self, keys: list[tuple[int, tuple | None]]) -> Counter[str]:
        """Leading blocks of a prompt, given as local hashes and extra keys, that each worker has."""
        found: Counter[str] = Counter()
        node, depth = self.root, 0
        for key in keys:
            if key not in node.children:
                break
            node, depth = node.children[key], depth + 1
            for worker in node.workers:
                if found[worker] == depth - 1:
                    found[worker] = depth
        return +found


# -- llm-d ----------------------------------------------------------------------------------------------------------


def fnv_64a(data: bytes) -> int:
    value = FNV_OFFSET
    for byte in data:
        value = (value ^ byte) * FNV_PRIME % (1 << 64)
    return value


@lru_cache(100_000)
def request_key(parent: int, tokens: tuple[int, ...], extra: tuple | None) -> int:
    """The router's own hash of a block, chained on the key of the block before."""
    return fnv_64a(cbor2.dumps([parent, tokens, extra], canonical=True))


@dataclass(frozen=True)
class Place:
    """Where a block lies."""

    pod: str
    tier: str
    group: int


@dataclass(frozen=True)
class Group:
    kind: str
    block_size: int
    window: int | None


@dataclass
class DualKeyIndex:
    """Request key -> places; engine key (the published hash) -> request keys; pods' groups as learned from events.

    Request keys are of blocks of a size of the router's own, `block_size`, that divides the engines'.
    """

    model: str
    block_size: int
    places: dict[int, Counter[Place]] = field(default_factory=dict)  # counts the engine blocks that cover the key
    request_keys_of: dict[tuple[Place, int], list[int]] = field(default_factory=dict)
    last_request_key: dict[int, int] = field(default_factory=dict)  # of an engine key in any group
    references: Counter[tuple[Place, int]] = field(default_factory=Counter)
    groups: dict[tuple[str, int], Group] = field(default_factory=dict)
    num_orphans: int = 0

    @property
    def root_key(self) -> int:
        return fnv_64a(cbor2.dumps([fnv_64a(b""), None, self.model], canonical=True))

    def apply(self, pod: str, batch: wire.EventBatch) -> None:
        for event in batch.events:
            if isinstance(event, wire.BlockStored):
                self._store(pod, event)
            elif isinstance(event, wire.BlockRemoved):
                self._remove(pod, event)
            else:
                self._clear(pod)

    def _store(self, pod: str, event: wire.BlockStored) -> None:
        place = Place(pod, event.medium.lower(), event.group_idx)
        self.groups[pod, event.group_idx] = Group(
            event.kv_cache_spec_kind, event.block_size, event.kv_cache_spec_sliding_window
        )
        parent = self.root_key
        if event.parent_block_hash is not None:
            if engine_key(event.parent_block_hash) not in self.last_request_key:
                self.num_orphans += 1
                return
            parent = self.last_request_key[engine_key(event.parent_block_hash)]
        blocks = chunks(event.token_ids, event.block_size)
        for block_hash, tokens, extra in zip(event.block_hashes, blocks, extra_keys_of(event), strict=True):
            keys = self.request_keys(tokens, parent, extra)
            parent = keys[-1]
            block_hash = engine_key(block_hash)
            assert self.last_request_key.setdefault(block_hash, parent) == parent
            if not self.references[place, block_hash]:
                self.request_keys_of[place, block_hash] = keys
                for key in keys:
                    self.places.setdefault(key, Counter())[place] += 1
            self.references[place, block_hash] += 1

    def _remove(self, pod: str, event: wire.BlockRemoved) -> None:
        place = Place(pod, event.medium.lower(), event.group_idx)
        for block_hash in map(engine_key, event.block_hashes):
            self.references[place, block_hash] -= 1
            if not self.references[place, block_hash]:
                self._forget(place, block_hash)

    def _clear(self, pod: str) -> None:
        for place, block_hash in [key for key in self.references if key[0].pod == pod]:
            self._forget(place, block_hash)

    def _forget(self, place: Place, block_hash: int) -> None:
        del self.references[place, block_hash]
        for key in self.request_keys_of.pop((place, block_hash)):
            self.places[key][place] -= 1
            self.places[key] = +self.places[key]
            if not self.places[key]:
                del self.places[key]

    def request_keys(self, tokens: Sequence[int], parent: int, extra: tuple | None = None) -> list[int]:
        keys = []
        for block in chunks(tuple(tokens), self.block_size):
            parent = request_key(parent, block, extra)
            keys.append(parent)
        return keys

    def score(self, tokens: Sequence[int]) -> Counter[str]:
        """Leading blocks of the prompt that each pod has in any group."""
        found: Counter[str] = Counter()
        for depth, key in enumerate(self.request_keys(tokens, self.root_key), start=1):
            for pod in {place.pod for place in self.places.get(key, ())}:
                if found[pod] == depth - 1:
                    found[pod] = depth
        return +found

    def longest_hit(self, pod: str, tokens: list[int]) -> int:
        """Tokens that the pod need not compute, by the rule of each of its groups: a search over all lengths."""
        groups = {group: info for (of_pod, group), info in self.groups.items() if of_pod == pod}
        return next(
            num_tokens
            for num_tokens in range(len(tokens) - 1, -1, -1)
            if all(self._has(pod, group, info, tokens[:num_tokens]) for group, info in groups.items())
        )

    def _has(self, pod: str, group: int, info: Group, tokens: list[int]) -> bool:
        if len(tokens) % info.block_size:
            return False
        present = [
            any((place.pod, place.group) == (pod, group) for place in self.places.get(key, ()))
            for key in self.request_keys(tokens, self.root_key)
        ]
        if info.window is not None:
            num_blocks = max(-(-(info.window - 1) // info.block_size), 1)
            present = present[-num_blocks * info.block_size // self.block_size :]
        return all(present)


def engine_key(block_hash: int | bytes) -> int:
    """Integers as they are, digests by their last 8 bytes."""
    return block_hash if isinstance(block_hash, int) else int.from_bytes(block_hash[-8:], "big")

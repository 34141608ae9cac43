"""Calls a KVCacheManager at random and checks every invariant after each call; prints seed, calls and time.

Flow:    deployments x random calls -> [random_calls] -> a line per deployment; exit status 1 at the first broken law

    scripts/random_calls.py --calls 1000000 --seed 0        the whole of it; a thousand calls take about a second

Pools are small, prompts share prefixes, and admissions, steps, rejections, forks, pins, preemptions, evictions,
invalidations, resets and refusals alternate; a refused call must leave the snapshot as it was, refused twice or
released windows excepted. A failure names the deployment and the seed that repeat it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvjax.core import (
    BlockHasher,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCachePoolSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    PinnedPrefix,
    Request,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from kvjax.errors import OutOfBlocksError

MAX_MODEL_LEN = 64
HASH_BLOCK_SIZE = 2
MAX_RUNNING = 8
MAX_ENCODER_TOKENS = 9
CALLS_PER_MANAGER = 2_000  # then a fresh one with other sizes
HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": "float32"}


def full(block_size: int) -> KVCacheSpec:
    return FullAttentionSpec(block_size=block_size, **HEADS)


def window(block_size: int, width: int) -> KVCacheSpec:
    return SlidingWindowSpec(block_size=block_size, sliding_window=width, **HEADS)


def chunked(block_size: int, chunk: int) -> KVCacheSpec:
    return ChunkedLocalAttentionSpec(block_size=block_size, attention_chunk_size=chunk, **HEADS)


def sink(block_size: int, length: int) -> KVCacheSpec:
    return SinkFullAttentionSpec(block_size=block_size, sink_len=length, **HEADS)


def cross(block_size: int) -> KVCacheSpec:
    return CrossAttentionSpec(block_size=block_size, max_num_encoder_tokens=MAX_ENCODER_TOKENS, **HEADS)


def latent(block_size: int, tokens_per_state: int = 1) -> KVCacheSpec:
    return MLAAttentionSpec(block_size=block_size, head_size=8, dtype="float32", tokens_per_state=tokens_per_state)


def latent_window(block_size: int, width: int) -> KVCacheSpec:
    return SlidingWindowMLASpec(block_size=block_size, head_size=8, dtype="float32", sliding_window=width)


def recurrent(block_size: int, mode: str = "align", drafts: int = 0) -> KVCacheSpec:
    return MambaSpec(
        block_size=block_size,
        shapes=((4, 2),),
        dtypes=("float32",),
        mamba_cache_mode=mode,
        num_speculative_blocks=drafts,
    )


@dataclass(frozen=True)
class Deployment:
    """Groups as (spec, pool), and options of the manager."""

    groups: tuple[tuple[KVCacheSpec, int], ...]
    options: dict[str, Any] = field(default_factory=dict)

    def manager(self, rng: np.random.Generator) -> KVCacheManager:
        pools = tuple(
            KVCachePoolSpec(int(rng.integers(4, 80))) for _ in range(1 + max(pool for _, pool in self.groups))
        )
        groups = tuple(KVCacheGroupSpec((f"layers.{i}",), *group) for i, group in enumerate(self.groups))
        return KVCacheManager(KVCacheConfig(pools, groups), MAX_MODEL_LEN, HASH_BLOCK_SIZE, **self.options)


DEPLOYMENTS = {
    "full": Deployment(((full(2), 0),)),
    "full, uncached first": Deployment(((full(4), 0),), {"eviction_policy": "lru"}),
    "full, no caching": Deployment(((full(2), 0),), {"enable_caching": False}),
    "full, reserved": Deployment(((full(2), 0),), {"reserve": True}),
    "window": Deployment(((window(2, 7), 0),)),
    "full + 2 windows": Deployment(
        ((full(2), 0), (window(2, 7), 0), (window(2, 7), 0)), {"track_origins": True, "zero_new_pages": True}
    ),
    "2 full + 2 windows, uncached first": Deployment(
        ((full(2), 0), (window(2, 5), 0), (full(2), 0), (window(2, 5), 0)), {"eviction_policy": "lru"}
    ),
    "full + window, two sizes, EAGLE": Deployment(((full(4), 0), (window(6, 9), 0)), {"use_eagle": True}),
    "full + windows, two pools, reserved": Deployment(
        ((full(2), 0), (window(2, 3), 1), (window(4, 9), 1)), {"reserve": True, "eviction_policy": "lru"}
    ),
    "chunked": Deployment(((chunked(4, 6), 0),)),
    "full + chunked": Deployment(((full(2), 0), (chunked(2, 8), 0), (chunked(4, 8), 0))),
    "full + cross": Deployment(((full(2), 0), (cross(4), 0))),
    "window + cross, two pools, reserved": Deployment(((window(2, 5), 0), (cross(2), 1)), {"reserve": True}),
    "sinks, EAGLE": Deployment(((sink(2, 4), 0),), {"use_eagle": True}),
    "full + sinks + MLA on four ranks": Deployment(
        ((full(2), 0), (sink(2, 16), 0), (latent(4), 1)), {"dcp_world_size": 2, "pcp_world_size": 2}
    ),
    "MLA": Deployment(((latent(2), 0),), {"eviction_policy": "lru"}),
    "MLA of several ratios + windows": Deployment(
        ((latent(8, 4), 0), (latent(8, 8), 1), (latent_window(4, 8), 0), (latent_window(2, 3), 1)), {"reserve": True}
    ),
    "Mamba": Deployment(((recurrent(4), 0),)),
    "full + Mamba, drafts, reserved": Deployment(((full(2), 0), (recurrent(4, drafts=2), 0)), {"reserve": True}),
    "full + Mamba, uncached first": Deployment(
        ((full(2), 0), (recurrent(4, drafts=1), 0), (recurrent(4, drafts=1), 0)), {"eviction_policy": "lru"}
    ),
    "full + windows, checkpoints, uncached first": Deployment(
        ((full(2), 0), (window(2, 5), 0), (window(2, 5), 0)),
        {"retention_interval": 8, "eviction_policy": "lru", "zero_new_pages": True},
    ),
    "full + window + Mamba, two pools, EAGLE": Deployment(
        ((full(2), 0), (window(4, 5), 1), (recurrent(2), 0), (recurrent(2), 0)), {"use_eagle": True}
    ),
    "full + window, segmented LRU": Deployment(
        ((full(2), 0), (window(2, 5), 0)), {"eviction_policy": "slru", "zero_new_pages": True}
    ),
    "full + chunked + Mamba, by cost": Deployment(
        ((full(2), 0), (chunked(2, 8), 0), (recurrent(4), 1)), {"eviction_policy": "cost", "track_origins": True}
    ),
    "full + windows + Mamba, checkpoints, EAGLE": Deployment(
        ((full(2), 0), (window(2, 5), 0), (window(4, 9), 1), (recurrent(2), 1)),
        {"retention_interval": 8, "use_eagle": True, "eviction_policy": "slru", "enable_kv_cache_events": True},
    ),
    "full + window + chunked + Mamba, on probation": Deployment(
        ((full(2), 0), (window(2, 5), 0), (chunked(2, 8), 0), (recurrent(4, drafts=1), 1)),
        {"retention_interval": "auto", "eviction_policy": "probation", "enable_kv_cache_events": True},
    ),
    "full + window + Mamba, as was learned": Deployment(
        ((full(2), 0), (window(2, 5), 0), (recurrent(4, drafts=1), 1)),
        {"retention_interval": "auto", "eviction_policy": "learned", "track_origins": True},
    ),
    "full, as was learned": Deployment(((full(2), 0),), {"eviction_policy": "learned", "same_step_hits": False}),
    "full + Mamba without caching": Deployment(((full(2), 0), (recurrent(4, "none", drafts=1), 0))),
    "full + window, hits from the next step": Deployment(
        ((full(2), 0), (window(2, 5), 0)), {"same_step_hits": False, "enable_kv_cache_events": True}
    ),
    "full + window, hits inside blocks": Deployment(
        ((full(4), 0), (window(6, 7), 0)),
        {"same_step_hits": False, "sub_block_hits": True, "enable_kv_cache_events": True, "zero_new_pages": True},
    ),
    "full + chunked + Mamba, hits inside blocks, reserved": Deployment(
        ((full(8), 0), (chunked(6, 10), 1), (recurrent(4), 1)),
        {"same_step_hits": False, "sub_block_hits": True, "reserve": True},
    ),
    "MLA of several ratios, hits inside blocks": Deployment(
        ((latent(8, 2), 0), (latent(8, 4), 0), (latent_window(4, 9), 1)),
        {"same_step_hits": False, "sub_block_hits": True, "track_origins": True, "eviction_policy": "lru"},
    ),
}


class RandomCalls:
    """One manager and its requests. Every method makes one call, or none where it would be a caller's mistake."""

    def __init__(self, deployment: Deployment, rng: np.random.Generator) -> None:
        self.rng = rng
        self.manager = deployment.manager(rng)
        self.tracks_origins = deployment.options.get("track_origins", False)
        self.may_refuse_steps = not deployment.options.get("reserve", False)
        self.hasher = BlockHasher(HASH_BLOCK_SIZE, "xxhash_cbor", seed="0")
        self.trunk = rng.integers(0, 2, MAX_MODEL_LEN).astype(np.int32)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.num_requests = 0
        self.pins: list[PinnedPrefix] = []
        self.lookahead: dict[str, int] = {}  # drafted tokens of each step of a request
        self.calls: list[tuple[Callable[[], object], float]] = [
            (self.admit, 0.25),
            (self.plan_step, 0.25),
            (self.allocate_one, 0.15),
            (self.fork, 0.06),
            (self.pin_or_unpin, 0.04),
            (self.finish_or_preempt, 0.1),
            (self.step_in_flight, 0.04),
            (self.take_back, 0.01),
            (self.evict, 0.05),
            (self.new_step, 0.04),
            (self.reset, 0.01),
        ]
        self.weights = np.cumsum([weight for _, weight in self.calls])

    def call(self) -> None:
        self.calls[int(np.searchsorted(self.weights, self.rng.random()))][0]()
        self.manager.check_invariants()

    def some(self, least: int, most: int) -> int:
        return int(self.rng.integers(least, most + 1))

    def step_of(self, request: Request, left: int, num_hit: int = 0) -> int:
        """New tokens of a step: at most those left, and what recurrent groups take at once."""
        return self.manager.limit_step(request, self.some(1, left), num_hit) or self.manager.limit_step(
            request, left, num_hit
        )

    def new_request(self) -> Request:
        self.num_requests += 1
        prompt = self.trunk[: self.some(1, MAX_MODEL_LEN - 8)].copy()
        prompt[-self.some(1, 4) :] = self.some(0, 1)
        most = self.some(1, MAX_MODEL_LEN - prompt.size)
        salt = "salt" if self.rng.random() < 0.1 else None
        return Request(f"r{self.num_requests}", prompt, cache_salt=salt, max_tokens=most, block_hasher=self.hasher)

    def admit(self) -> None:
        if len(self.running) >= MAX_RUNNING:
            return
        request = self.waiting.pop() if self.waiting else self.new_request()
        blocks, num_hit = self.manager.get_computed_blocks(request)
        new = self.step_of(request, request.num_tokens - num_hit, num_hit)
        before = self.manager.snapshot()
        lookahead = self.lookahead[request.request_id] = self.some(0, 2)
        options = {
            "num_lookahead_tokens": lookahead,
            "full_sequence_must_fit": bool(self.rng.random() < 0.5),
            "num_encoder_tokens": self.some(0, MAX_ENCODER_TOKENS),
        }
        if self.manager.allocate_slots(request, new, num_hit, blocks, **options) is None:
            assert self.manager.snapshot() == before, "a refused admission changed the state"
            if len(self.waiting) < MAX_RUNNING:
                self.waiting.append(request)
            return
        request.num_computed_tokens = num_hit + new
        self.running.append(request)
        self.sample(request)

    def sample(self, request: Request) -> None:
        """A token for a request whose tokens are all computed; at its end it goes."""
        if request.num_computed_tokens < request.num_tokens:
            return
        if request.num_output_tokens == request.max_tokens:
            self.manager.free(request)
            self.running.remove(request)
        else:
            request.append_output_token_ids(self.some(0, 1))

    def plan_step(self) -> None:
        chosen = [request for request in self.running if self.rng.random() < 0.8]
        new = [self.step_of(request, request.num_tokens - request.num_computed_tokens) for request in chosen]
        rows, lookahead = [request.row for request in chosen], [self.lookahead[r.request_id] for r in chosen]
        planned = self.manager.plan_step(rows, new, num_lookahead_tokens=lookahead).num_planned
        assert planned == len(chosen) or self.may_refuse_steps, "a step was refused in spite of the reservations"
        for request, count in zip(chosen[:planned], new, strict=False):
            request.num_computed_tokens += count
            self.sample(request)

    def allocate_one(self) -> None:
        if not self.running:
            return
        request = self.running[self.some(0, len(self.running) - 1)]
        new = self.step_of(request, request.num_tokens - request.num_computed_tokens)
        options = {"num_lookahead_tokens": self.lookahead[request.request_id]}
        if self.manager.allocate_slots(request, new, **options) is not None:
            request.num_computed_tokens += new
            self.sample(request)
            return
        assert self.may_refuse_steps, "a step was refused in spite of the reservations"
        refused = self.manager.snapshot()
        assert self.manager.allocate_slots(request, new, **options) is None, "a refused call was granted"
        assert self.manager.snapshot() == refused, "a call refused twice changed the state"

    def fork(self) -> None:
        num_children = self.some(1, 3)
        if not self.running or len(self.running) + num_children > MAX_RUNNING:
            return
        request = self.running[self.some(0, len(self.running) - 1)]
        names = [f"r{self.num_requests + 1 + i}" for i in range(num_children)]
        before = self.manager.snapshot()
        children = self.manager.fork(request, num_children, request_ids=names)
        if children is None:
            assert self.manager.snapshot() == before, "a refused fork changed the state"
            return
        self.num_requests += num_children
        self.running += children
        self.lookahead.update(dict.fromkeys(names, self.lookahead[request.request_id]))

    def pin_or_unpin(self) -> None:
        if self.pins and self.rng.random() < 0.5:
            self.manager.unpin(self.pins.pop(self.some(0, len(self.pins) - 1)))
            return
        before = self.manager.snapshot()
        try:
            pinned = self.manager.pin(self.new_request(), longest_request=self.some(1, 16))
        except OutOfBlocksError:
            assert self.manager.snapshot() == before, "a refused pin changed the state"
        else:
            self.pins += [] if pinned is None else [pinned]

    def finish_or_preempt(self) -> None:
        if not self.running:
            return
        request = self.running.pop(self.some(0, len(self.running) - 1))
        self.manager.free(request)
        if self.rng.random() < 0.5:
            request.num_computed_tokens = 0
            request.num_preemptions += 1
            self.waiting.append(request)

    def step_in_flight(self) -> None:
        """A step whose predecessor is not read yet and is then taken back: nothing advances."""
        for request in self.running:
            if request.num_output_tokens and request.num_computed_tokens > request.num_prompt_tokens:
                self.manager.allocate_slots(request, 1, num_in_flight_tokens=1)
                self.manager.take_back_step([request.row])
                return

    def take_back(self) -> None:
        """A step of some requests that is planned and not dispatched."""
        chosen = [request for request in self.running if self.rng.random() < 0.5]
        left = [request.num_tokens - request.num_computed_tokens for request in chosen]
        new = [self.step_of(request, count) for request, count in zip(chosen, left, strict=True)]
        self.manager.plan_step([request.row for request in chosen], new)
        assert not self.manager.take_back_step([request.row for request in chosen])

    def evict(self) -> None:
        pool_id = self.some(0, len(self.manager.block_pools) - 1)
        num_blocks = self.manager.block_pools[pool_id].num_blocks
        self.manager.evict_blocks(self.rng.integers(0, num_blocks, self.some(0, 3)), pool_id)
        if self.tracks_origins:
            self.manager.invalidate(cache_salt="salt")

    def new_step(self) -> None:
        self.manager.new_step_starts()
        self.manager.take_events()
        self.manager.take_page_copies()
        self.manager.take_pages_to_zero()

    def reset(self) -> None:
        self.manager.take_page_copies()
        is_idle = not self.running and not self.pins
        assert self.manager.reset_prefix_cache() == is_idle, "a reset while blocks are held, or none"


def run(name: str, num_calls: int, seed: int) -> None:
    """Makes the calls on one deployment."""
    rng = np.random.default_rng([seed, *name.encode()])
    for start in range(0, num_calls, CALLS_PER_MANAGER):
        calls = RandomCalls(DEPLOYMENTS[name], rng)
        for _ in range(min(CALLS_PER_MANAGER, num_calls - start)):
            calls.call()


def main(arguments: list[str] | None = None) -> int:
    """Runs every deployment; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=20_000, help="calls in all (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default %(default)s)")
    options = parser.parse_args(arguments)
    if options.calls < 1:
        parser.error(f"expected --calls of at least 1, got {options.calls}")
    began = time.perf_counter()
    each = -(-options.calls // len(DEPLOYMENTS))
    for name in DEPLOYMENTS:
        start = time.perf_counter()
        try:
            run(name, each, options.seed)
        except Exception as error:
            print(f"{name}, seed {options.seed}: {type(error).__name__}: {error}", file=sys.stderr)
            raise
        print(f"{name:45} {each:>9,} calls {time.perf_counter() - start:8.1f} s", flush=True)
    total = each * len(DEPLOYMENTS)
    print(f"{total:,} calls, seed {options.seed}, no invariant broken, {time.perf_counter() - began:,.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

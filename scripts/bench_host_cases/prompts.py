"""Cases of one long prompt in blocks of 16 tokens: allocation, prefix hits and frees.

Hits are looked up with hash objects that Python has not hashed before. The baseline is `PlainManager`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bench_host_cases.case import BenchCase, sample_us
from bench_host_cases.plain_manager import PlainGroup, PlainManager, PlainRequest
from kvjax.core import BlockHasher, FullAttentionSpec, KVCacheConfig, KVCacheManager, Request

BLOCK_SIZE = 16
VOCABULARY = 150_000
NUM_PROMPTS = 4
FULL = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype="bfloat16")


class LongPrompts:
    """Prompts of `num_tokens` + 1 tokens, whose first `num_tokens` fill blocks, in a pool that holds two of them.

    Taken in turn, a prompt is no longer cached when its turn comes, and the blocks that it gets hold older hashes.
    `manager` and `requests` are kvjax's or vLLM's, which share the names that are called here.
    """

    def __init__(self, manager: Any, requests: list[Any], num_tokens: int) -> None:
        self.manager = manager
        self.requests = requests
        self.num_tokens = num_tokens

    @property
    def request(self) -> Any:
        """The prompt whose turn it is."""
        return self.requests[0]

    def next_prompt(self) -> None:
        self.requests.append(self.requests.pop(0))

    def allocate(self) -> None:
        if self.manager.allocate_slots(self.request, self.num_tokens) is None:
            raise AssertionError("the pool is too small")

    def free(self) -> None:
        self.manager.free(self.request)

    def renew_hashes(self) -> None:
        self.request.block_hashes[:] = [bytes(bytearray(block_hash)) for block_hash in self.request.block_hashes]

    def look_up(self) -> None:
        if self.manager.get_computed_blocks(self.request)[1] != self.num_tokens:
            raise AssertionError("expected a hit of the whole prompt")


def long_prompts(num_tokens: int) -> LongPrompts:
    rng, hasher = np.random.default_rng(0), BlockHasher(BLOCK_SIZE, seed="bench")
    config = KVCacheConfig.single_pool(2 * num_tokens // BLOCK_SIZE + 1, FULL)
    prompts = [rng.integers(0, VOCABULARY, num_tokens + 1).astype(np.int32) for _ in range(NUM_PROMPTS)]
    requests = [Request(f"r{i}", prompt, block_hasher=hasher) for i, prompt in enumerate(prompts)]
    return LongPrompts(KVCacheManager(config, num_tokens + BLOCK_SIZE, BLOCK_SIZE), requests, num_tokens)


class PlainLongPrompts:
    """The same in the plain manager."""

    def __init__(self, num_tokens: int) -> None:
        num_blocks = num_tokens // BLOCK_SIZE
        self.num_tokens = num_tokens
        self.manager = PlainManager(2 * num_blocks + 1, [PlainGroup(b"\0", BLOCK_SIZE)])
        self.requests = [
            PlainRequest(f"r{i}", num_tokens, [os.urandom(32) for _ in range(num_blocks)]) for i in range(NUM_PROMPTS)
        ]
        self.request = self.requests[0]

    def next_prompt(self) -> None:
        self.requests.append(self.requests.pop(0))
        self.request = self.requests[0]

    def allocate(self) -> None:
        self.manager.allocate_slots(self.request, self.num_tokens)

    def free(self) -> None:
        self.manager.free(self.request)

    def renew_hashes(self) -> None:
        self.request.hashes = [bytes(bytearray(block_hash)) for block_hash in self.request.hashes]

    def look_up(self) -> None:
        if len(self.manager.find_hit(self.request)) * BLOCK_SIZE != self.num_tokens:
            raise AssertionError("expected a hit of the whole prompt")


Prompts = Callable[[int], LongPrompts | PlainLongPrompts]


def allocate_samples(prompts: Prompts, num_tokens: int) -> list[float]:
    long = prompts(num_tokens)
    long.allocate()

    def replace() -> None:
        long.free()
        long.next_prompt()

    for _ in range(NUM_PROMPTS):
        replace()
        long.allocate()
    return sample_us(long.allocate, 50, replace)


def free_samples(prompts: Prompts, num_tokens: int) -> list[float]:
    long = prompts(num_tokens)
    long.next_prompt()

    def replace() -> None:
        long.next_prompt()
        long.allocate()

    return sample_us(long.free, 100, replace)


def hit_samples(prompts: Prompts, num_tokens: int) -> list[float]:
    long = prompts(num_tokens)
    long.allocate()
    return sample_us(long.look_up, 100, long.renew_hashes)


def case(name: str, samples: Callable[..., list[float]], num_tokens: int) -> BenchCase:
    return BenchCase(name, partial(samples, long_prompts, num_tokens), partial(samples, PlainLongPrompts, num_tokens))


def cases() -> list[BenchCase]:
    return [
        case("allocate/32k", allocate_samples, 32_768),
        case("prefix_hit/2k", hit_samples, 2_048),
        case("prefix_hit/32k", hit_samples, 32_768),
        case("free/32k", free_samples, 32_768),
    ]

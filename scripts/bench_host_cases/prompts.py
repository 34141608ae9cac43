"""Cases of prompts: one that is admitted, a long one in parts, one that evicts, and one beside running requests.

A prompt that is admitted is looked up, misses, gets slots for all its tokens, and is freed; every request is a new one,
and no block is evicted. Hits are looked up with hash objects that Python has not hashed before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from bench_host_cases.case import BenchCase, Side, case, collector_off, sample_us, time_us
from bench_host_cases.shapes import BLOCK_SIZE, FULL, SLIDING
from bench_host_cases.sides import KVJAX

MAX_MODEL_LEN = 8_192
NUM_ADMITTED = 200
NUM_PROMPTS = 4
POLICIES = ("probation", "learned")
EVICTION_PARTS = ("inside_admission", "between_steps")


def allocate(manager: Any, request: Any, num_tokens: int, num_hit: int = 0, hit: Any = None) -> None:
    hits = () if hit is None else (num_hit, hit)
    if manager.allocate_slots(request, num_tokens - num_hit, *hits) is None:
        raise AssertionError("the pool is too small")


def admit(manager: Any, request: Any) -> None:
    hit, num_hit, *_ = manager.get_computed_blocks(request)
    allocate(manager, request, request.num_tokens, num_hit, hit)


def admit_and_free(manager: Any, request: Any) -> None:
    admit(manager, request)
    manager.free(request)


def admission_samples(side: Side, num_tokens: int) -> list[float]:
    manager = side.manager((FULL,), (NUM_ADMITTED + 2) * -(-num_tokens // BLOCK_SIZE) + 1, MAX_MODEL_LEN)
    requests = [side.request(f"r{i}", num_tokens) for i in range(NUM_ADMITTED + 1)]

    return sample_us(lambda: admit_and_free(manager, requests.pop()), NUM_ADMITTED)


class LongPrompts:
    """Prompts whose first `num_tokens` tokens fill blocks, in a pool that holds two of them.

    Taken in turn, a prompt is no longer cached when its turn comes, and the blocks that it gets hold older hashes.
    """

    def __init__(self, side: Side, num_tokens: int) -> None:
        self.manager = side.manager((FULL,), 2 * num_tokens // BLOCK_SIZE + 1, num_tokens + BLOCK_SIZE)
        self.requests = [side.request(f"r{i}", num_tokens + 1) for i in range(NUM_PROMPTS)]
        self.num_tokens = num_tokens

    @property
    def request(self) -> Any:
        """The prompt whose turn it is."""
        return self.requests[0]

    def next_prompt(self) -> None:
        self.requests.append(self.requests.pop(0))

    def allocate(self) -> None:
        allocate(self.manager, self.request, self.num_tokens)

    def free(self) -> None:
        self.manager.free(self.request)

    def free_and_go_on(self) -> None:
        self.free()
        self.next_prompt()

    def go_on_and_allocate(self) -> None:
        self.next_prompt()
        self.allocate()

    def renew_hashes(self) -> None:
        self.request.block_hashes[:] = [bytes(bytearray(block_hash)) for block_hash in self.request.block_hashes]

    def look_up(self) -> None:
        if self.manager.get_computed_blocks(self.request)[1] != self.num_tokens:
            raise AssertionError("expected a hit of the whole prompt")


def allocate_samples(side: Side, num_tokens: int) -> list[float]:
    long = LongPrompts(side, num_tokens)
    long.allocate()
    for _ in range(NUM_PROMPTS):
        long.free_and_go_on()
        long.allocate()
    return sample_us(long.allocate, 50, long.free_and_go_on)


def free_samples(side: Side, num_tokens: int) -> list[float]:
    long = LongPrompts(side, num_tokens)
    return sample_us(long.free, 100, long.go_on_and_allocate)


def hit_samples(side: Side, num_tokens: int) -> list[float]:
    long = LongPrompts(side, num_tokens)
    long.allocate()
    return sample_us(long.look_up, 100, long.renew_hashes)


def eviction_samples(part: str, policy: str) -> list[float]:
    """What a policy costs where the pool is full of cached prompts and each new one evicts as many blocks as it takes.

    Inside an admission are the lookup and the slots. Between steps are the end of the request and the start of the next
    step. What "learned" does once in 200 requests, for about 300 us, no median shows.
    """
    num_tokens, num_cached, repetitions = 1_024, 100, 500
    num_blocks = num_cached * num_tokens // BLOCK_SIZE + 1
    manager = KVJAX.manager((FULL,), num_blocks, MAX_MODEL_LEN, eviction_policy=policy)
    requests = [KVJAX.request(f"r{i}", num_tokens) for i in range(num_cached + repetitions)]
    found: dict[str, list[float]] = {part: [] for part in EVICTION_PARTS}

    def end_step() -> None:
        manager.free(request)
        manager.new_step_starts()

    with collector_off():
        for request in requests:
            found["inside_admission"].append(time_us(partial(admit, manager, request)))
            request.num_computed_tokens = num_tokens
            found["between_steps"].append(time_us(end_step))
    return found[part][num_cached:]


def first_chunk_samples(side: Side) -> list[float]:
    """The longest call while a prompt of a million tokens begins beside 255 requests that decode, in six groups.

    The prompt is looked up and gets slots for its first chunk and its second; the others decode a step; it is freed.
    Each sample comes from a new manager, since tables grow once.
    """
    long = side.request("long", 1_000_000)
    return [longest_call_us(side, long) for _ in range(5)]


def longest_call_us(side: Side, long: Any) -> float:
    specs, num_requests, num_tokens, chunk = (FULL, *[SLIDING] * 5), 256, 1_000, 8_192
    num_blocks = len(specs) * (num_requests * (num_tokens // BLOCK_SIZE + 2) + 3 * chunk // BLOCK_SIZE)
    manager = side.manager(specs, num_blocks, 1 << 20)
    running = [side.request(f"r{i}", num_tokens) for i in range(num_requests - 1)]
    for request in running:
        allocate(manager, request, num_tokens)
        request.num_computed_tokens = num_tokens

    def go_on() -> None:
        long.num_computed_tokens = chunk
        allocate(manager, long, chunk)

    calls: list[Callable[[], object]] = [
        lambda: manager.get_computed_blocks(long),
        lambda: allocate(manager, long, chunk),
        go_on,
        *side.decode_calls(manager, running),
        lambda: manager.free(long),
    ]
    with collector_off():
        longest = max([time_us(call) for call in calls])
    long.num_computed_tokens = 0
    return longest


def cases() -> list[BenchCase]:
    """A list of them."""
    return [
        *(
            case(f"admit/{name}", admission_samples, size)
            for name, size in (("40", 40), ("200", 200), ("1k", 1_024), ("4k", 4_096))
        ),
        case("allocate/32k", allocate_samples, 32_768),
        case("prefix_hit/2k", hit_samples, 2_048),
        case("prefix_hit/32k", hit_samples, 32_768),
        case("free/32k", free_samples, 32_768),
        *(
            BenchCase(
                f"evict/{part}/{policy}",
                partial(eviction_samples, part, policy),
                partial(eviction_samples, part, "lru"),
            )
            for part in EVICTION_PARTS
            for policy in POLICIES
        ),
        case("first_chunk/1M", first_chunk_samples, has_vllm=False),
    ]

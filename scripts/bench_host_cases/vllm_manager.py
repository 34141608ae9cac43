"""vLLM's own code for the cases that it has a counterpart of: its KVCacheManager, BlockPool and block hasher.

Imported where vLLM is installed alone (`bench_host.py --vllm`). Requests, prompts and pools are those of the cases.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from bench_host_cases import admission, decoding, hashing, pool, prompts
from bench_host_cases.case import collector_off, sample_us, time_us
from kvjax.core import KVCacheSpec

BLOCK_SIZE = 16
SHAPES = ("full", "hybrid", "mla", "chunked", "mamba_align")


def supported(call: Any, **arguments: Any) -> Any:
    """Calls with those of the arguments that this release's `call` takes."""
    known = inspect.signature(call).parameters
    return call(**{name: value for name, value in arguments.items() if name in known})


def spec_of(spec: KVCacheSpec) -> Any:
    """vLLM's spec of kvjax's."""
    names = ("block_size", "num_kv_heads", "head_size", "sliding_window", "attention_chunk_size", "mamba_cache_mode")
    fields = {name: value for name in names if (value := getattr(spec, name, None)) is not None}
    if hasattr(spec, "shapes"):
        fields |= {"shapes": spec.shapes, "dtypes": tuple(getattr(torch, dtype) for dtype in spec.dtypes)}
    else:
        fields = {"num_kv_heads": 1, "dtype": torch.bfloat16} | fields
    return getattr(interface, type(spec).__name__)(**fields)


def make_manager(specs: tuple[KVCacheSpec, ...], num_blocks: int, max_model_len: int) -> KVCacheManager:
    groups = [interface.KVCacheGroupSpec([f"layers.{i}"], spec_of(spec)) for i, spec in enumerate(specs)]
    config = interface.KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    sizes = {"hash_block_size": BLOCK_SIZE, "scheduler_block_size": BLOCK_SIZE}
    return supported(KVCacheManager, kv_cache_config=config, max_model_len=max_model_len, **sizes)


def make_request(name: str, token_ids: list[int], hashes: list[bytes] | None = None, hasher: Any = None) -> Request:
    """A request with those hashes, or hashed by vLLM's hasher."""
    request = supported(
        Request,
        request_id=name,
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(max_tokens=1_000),
        pooling_params=None,
        eos_token_id=None,
        block_hasher=hasher,
    )
    if hashes is not None:
        request.block_hashes[:] = hashes
    return request


def random_hashes(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def block_hasher() -> Any:
    hash_value = get_hash_fn_by_name("sha256_cbor")
    init_none_hash(hash_value)
    return get_request_block_hasher(BLOCK_SIZE, hash_value)


class Decoding:
    """The requests of a decoding case past their prompts."""

    def __init__(self, shape: decoding.Shape, num_requests: int) -> None:
        rng, hasher = np.random.default_rng(0), block_hasher()
        self.num_blocks = shape.config(num_requests).pools[0].num_blocks
        self.manager = make_manager(shape.specs, self.num_blocks, shape.most_tokens + 1)
        self.requests = []
        for i in range(num_requests):
            tokens = rng.integers(0, decoding.VOCABULARY, shape.prompt + i % shape.spread).tolist()
            request = make_request(f"r{i}", tokens, hasher=hasher)
            self.allocate(request, len(tokens))
            request.num_computed_tokens = len(tokens)
            release = getattr(self.manager, "remove_skipped_blocks", self.manager.coordinator.remove_skipped_blocks)
            release(request.request_id, len(tokens))
            self.requests.append(request)
        for _ in range(decoding.WARM_UP_STEPS):
            self.append()
            self.step()

    def append(self) -> None:
        for request in self.requests:
            request.append_output_token_ids(7)
        if hasattr(self.manager, "new_step_starts"):  # from 0.22 on
            self.manager.new_step_starts()

    def allocate(self, request: Request, num_tokens: int) -> None:
        if self.manager.allocate_slots(request, num_tokens) is None:
            raise AssertionError("the pool is too small")

    def step(self) -> None:
        allocate = self.manager.allocate_slots
        for request in self.requests:
            allocate(request, 1)
            request.num_computed_tokens += 1


def step_samples(shape: decoding.Shape, num_requests: int) -> list[float]:
    return _samples_of(Decoding(shape, num_requests), decoding.NUM_STEPS // 4)


def _samples_of(state: Decoding, count: int) -> list[float]:
    samples = []
    with collector_off():
        for _ in range(count):
            state.append()
            samples.append(time_us(state.step))
    return samples


def evicting_step_samples(num_requests: int) -> list[float]:
    state = Decoding(decoding.SHAPES["full"], num_requests)
    state.manager.max_model_len = BLOCK_SIZE * state.num_blocks
    free = state.manager.block_pool.get_num_free_blocks()
    other = make_request("other", [0] * (BLOCK_SIZE * free), random_hashes(free))
    state.allocate(other, other.num_tokens)
    state.manager.free(other)
    return _samples_of(state, decoding.NUM_STEPS // 4)


def step_with_tokens_samples(num_requests: int) -> list[float]:
    state = Decoding(decoding.SHAPES["full"], num_requests)

    def step() -> None:
        state.append()
        state.step()

    return sample_us(step, decoding.NUM_STEPS // 4)


def admission_samples(num_tokens: int) -> list[float]:
    manager = make_manager((admission.FULL,), admission.num_blocks_for(num_tokens), admission.MAX_MODEL_LEN)
    requests = [
        make_request(f"r{i}", [0] * num_tokens, random_hashes(num_tokens // BLOCK_SIZE))
        for i in range(admission.REPETITIONS + 1)
    ]

    def admit() -> None:
        request = requests.pop()
        hit, num_computed, *_ = manager.get_computed_blocks(request)
        if manager.allocate_slots(request, num_tokens - num_computed, num_computed, hit) is None:
            raise AssertionError("the pool is too small")
        manager.free(request)

    return sample_us(admit, admission.REPETITIONS)


def long_prompts(num_tokens: int) -> prompts.LongPrompts:
    count = num_tokens // BLOCK_SIZE
    manager = make_manager((prompts.FULL,), 2 * count + 1, num_tokens + BLOCK_SIZE)
    requests = [make_request(f"r{i}", [0] * (num_tokens + 1), random_hashes(count)) for i in range(prompts.NUM_PROMPTS)]
    return prompts.LongPrompts(manager, requests, num_tokens)


def hash_samples(algorithm: str) -> list[float]:
    hash_value = get_hash_fn_by_name(algorithm)
    init_none_hash(hash_value)
    hasher = get_request_block_hasher(BLOCK_SIZE, hash_value)
    request = make_request("r", hashing.make_tokens().tolist())
    return sample_us(lambda: hasher(request), hashing.BASELINE_REPETITIONS)


def make_pool(num_blocks: int) -> BlockPool:
    return supported(BlockPool, num_gpu_blocks=num_blocks, enable_caching=True, hash_block_size=BLOCK_SIZE)


def get_samples() -> list[float]:
    own = make_pool(pool.NUM_BLOCKS)
    return sample_us(lambda: own.get_new_blocks(pool.NUM_TAKEN), 90)


def free_samples() -> list[float]:
    own, taken = make_pool(pool.NUM_BLOCKS), []
    return sample_us(
        lambda: own.free_blocks(taken[-1]),
        pool.REPETITIONS,
        lambda: taken.append(own.get_new_blocks(pool.NUM_TAKEN)[::-1]),
    )


def get_evicting_samples() -> list[float]:
    own = make_pool(pool.NUM_TAKEN + 1)
    held = [own.get_new_blocks(pool.NUM_TAKEN)]

    def fill() -> None:
        request = SimpleNamespace(block_hashes=random_hashes(pool.NUM_TAKEN))
        own.cache_full_blocks(request, held[0], 0, pool.NUM_TAKEN, BLOCK_SIZE, 0)
        own.free_blocks(held[0][::-1])

    def take() -> None:
        held[0] = own.get_new_blocks(pool.NUM_TAKEN)

    return sample_us(take, pool.REPETITIONS, fill)


def counterparts() -> dict[str, Callable[[], list[float]]]:
    """Samples of vLLM's code by the name of the case."""
    steps = {
        f"decode_step/{name}/{count}": partial(step_samples, decoding.SHAPES[name], count)
        for name in SHAPES
        for count in ((1_024, 4_096) if name == "full" else (1_024,))
    }
    long = {
        f"{name}/{size}": partial(samples, long_prompts, num_tokens)
        for name, samples in (
            ("allocate", prompts.allocate_samples),
            ("prefix_hit", prompts.hit_samples),
            ("free", prompts.free_samples),
        )
        for size, num_tokens in (("2k", 2_048), ("32k", 32_768))
    }
    full = decoding.SHAPES["full"]
    return {
        **steps,
        "decode_step/full/1024/evicting": partial(evicting_step_samples, 1_024),
        "decode_step_with_tokens/full/1024": partial(step_with_tokens_samples, 1_024),
        "allocate_slots/decode": lambda: [sample / 1_024 for sample in step_samples(full, 1_024)],
        **{f"admit/{name}": partial(admission_samples, size) for name, size in admission.SIZES.items()},
        **long,
        **{f"hash/{algorithm}/32k": partial(hash_samples, algorithm) for algorithm in hashing.ALGORITHMS},
        "pool/get/1000": get_samples,
        "pool/free/1000": free_samples,
        "pool/get_evicting/1000": get_evicting_samples,
    }

"""vLLM's side of the cases: its own KVCacheManager, BlockPool and block hasher. Imported where vLLM is installed."""

# ruff: noqa: E402
from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = CpuPlatform()  # before anything asks for it

# isort: split
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from bench_host_cases.kvjax_side import random_tokens
from bench_host_cases.shapes import BLOCK_SIZE, WARM_UP_STEPS, Shape
from kvjax.core import KVCacheSpec


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


def config_of(specs: Sequence[KVCacheSpec], num_blocks: int) -> Any:
    """vLLM's, with a group for each spec."""
    groups = [interface.KVCacheGroupSpec([f"layers.{i}"], spec_of(spec)) for i, spec in enumerate(specs)]
    return interface.KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


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


def block_hasher(algorithm: str = "sha256_cbor") -> Any:
    hash_value = get_hash_fn_by_name(algorithm)
    init_none_hash(hash_value)
    return get_request_block_hasher(BLOCK_SIZE, hash_value)


def make_manager(kind: Any, specs: Sequence[KVCacheSpec], num_blocks: int, max_model_len: int) -> Any:
    """A manager of vLLM's class, or of one that has its calls; its constructor takes what this release's does."""
    sizes = {"max_model_len": max_model_len, "hash_block_size": BLOCK_SIZE, "scheduler_block_size": BLOCK_SIZE}
    known = inspect.signature(KVCacheManager).parameters
    sizes = {name: size for name, size in sizes.items() if name in known}
    return kind(config_of(specs, num_blocks), **sizes)


class VllmSide:
    """As `Side`. Deals with kinds that have a spec of the same name in vLLM."""

    def manager(self, specs: Sequence[KVCacheSpec], num_blocks: int, max_model_len: int) -> KVCacheManager:
        return make_manager(KVCacheManager, specs, num_blocks, max_model_len)

    def request(self, name: str, num_tokens: int) -> Request:
        return make_request(name, [0] * num_tokens, random_hashes(num_tokens // BLOCK_SIZE))

    def decoding(self, shape: Shape, num_requests: int) -> Decoding:
        return Decoding(self, shape, num_requests)

    def decode_calls(self, manager: KVCacheManager, running: list[Request]) -> list[Callable[[], object]]:
        raise NotImplementedError("no case of vLLM's decodes so")

    def pool(self, num_blocks: int) -> BlockPool:
        return supported(BlockPool, num_gpu_blocks=num_blocks, enable_caching=True, hash_block_size=BLOCK_SIZE)

    def register(self, pool: BlockPool, blocks: list[Any], hashes: list[bytes]) -> None:
        pool.cache_full_blocks(SimpleNamespace(block_hashes=hashes), blocks, 0, len(blocks), BLOCK_SIZE, 0)

    def hashing(self, algorithm: str, num_tokens: int) -> Callable[[], object]:
        hasher, request = block_hasher(algorithm), make_request("r", random_tokens("hashed", num_tokens).tolist())
        return lambda: hasher(request)


class Decoding:
    """Requests past their prompts; a step is a loop over them."""

    def __init__(self, side: VllmSide, shape: Shape, num_requests: int) -> None:
        hasher = block_hasher()
        self.num_blocks = shape.config(num_requests).pools[0].num_blocks
        self.manager = side.manager(shape.specs, self.num_blocks, shape.most_tokens + 1)
        self.requests = []
        for i in range(num_requests):
            tokens = random_tokens(f"r{i}", shape.prompt + i % shape.spread).tolist()
            request = make_request(f"r{i}", tokens, hasher=hasher)
            self.allocate(request, len(tokens))
            request.num_computed_tokens = len(tokens)
            release = getattr(self.manager, "remove_skipped_blocks", self.manager.coordinator.remove_skipped_blocks)
            release(request.request_id, len(tokens))
            self.requests.append(request)
        for _ in range(WARM_UP_STEPS):
            self.next_step()
            self.step()

    def allocate(self, request: Request, num_tokens: int) -> None:
        if self.manager.allocate_slots(request, num_tokens) is None:
            raise AssertionError("the pool is too small")

    def next_step(self) -> None:
        for request in self.requests:
            request.append_output_token_ids(7)
        if hasattr(self.manager, "new_step_starts"):  # from 0.22 on
            self.manager.new_step_starts()

    def step(self) -> None:
        allocate = self.manager.allocate_slots
        for request in self.requests:
            allocate(request, 1)
            request.num_computed_tokens += 1

    def step_with_tokens(self) -> tuple[Callable[[], None], None]:
        def step() -> None:
            self.next_step()
            self.step()

        return step, None

    def cache_free_blocks(self) -> None:
        self.manager.max_model_len = BLOCK_SIZE * self.num_blocks
        free = self.manager.block_pool.get_num_free_blocks()
        other = make_request("other", [0] * (BLOCK_SIZE * free), random_hashes(free))
        self.allocate(other, other.num_tokens)
        self.manager.free(other)

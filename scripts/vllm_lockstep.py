"""vLLM 0.33's KV cache manager and kvjax's under its rules, call by call: models with states, or with R-SWA.

Usage:   DIR/python scripts/vllm_lockstep.py [--calls 100000] [--seed 0], by the wrapper that vllm_conformance.sh writes
Flow:    random models and requests, steps of vLLM's scheduler -> both managers -> the first answer that differs
Source:  sched/scheduler.py of vLLM 0.33.0 (`_mamba_block_aligned_split`, which says where steps end)

Compared after each call: tokens and blocks of hits, whether slots are given and which blocks are new, every table, page
copies, states that are offered to connectors, and the number of free blocks. Where hits end inside blocks the ids are
compared; elsewhere kvjax registers fewer states (docs/vllm-differences.md), so blocks are reused in another order, and
which places of tables are empty is compared. The exit status is 1 if any answer differs.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from math import lcm
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_host_cases.vllm_side import make_request  # sets vLLM's platform, so it comes first

# isort: split
import torch
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager as OwnManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    RSWASpec,
    SlidingWindowSpec,
)

from kvjax.adapters.vllm import KVCacheManager

HASH_BLOCK = 4
HASHER = get_request_block_hasher(HASH_BLOCK, sha256_cbor)
MAX_MODEL_LEN = 512
CALLS_PER_MODEL = 600


def mamba(size: int, checkpoints: int, drafts: int) -> MambaSpec:
    return MambaSpec(
        block_size=size,
        shapes=((1, 1),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
        num_speculative_blocks=drafts,
        num_prefill_checkpoint_blocks=checkpoints,
        prefill_checkpoint_alignment=HASH_BLOCK if checkpoints else None,
    )


def full(size: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)


def window() -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=4, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=9)


def rswa(size: int, tokens: int) -> RSWASpec:
    return RSWASpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32, rswa_window=tokens)


def resolved(copies: list[Any]) -> list[tuple[int, int]]:
    """Copies none of which reads what another writes."""
    sources: dict[int, int] = {}
    for copy in copies:
        sources[copy.dst_block_id] = sources.get(copy.src_block_id, copy.src_block_id)
    return [(source, to) for to, source in sources.items()]


class Pair:
    """Both managers of one random model, and its requests."""

    def __init__(self, rng: random.Random, has_states: bool) -> None:
        self.rng = rng
        size = rng.choice((4, 8, 16))
        checkpoints, drafts = rng.randint(0, 1), rng.choice((0, 0, 2))
        specs: list[Any] = [full(rng.choice((4, 8))), *[mamba(size, checkpoints, drafts)] * rng.randint(1, 2)]
        self.has_states = has_states
        self.preempted: list[Any] = []
        if not has_states:
            size, checkpoints, drafts = 4, 0, 0
            tokens = rng.randint(1, 20)
            specs = [*[rswa(4, tokens)] * rng.randint(1, 2), *[full(4)] * rng.randint(0, 1)]
        self.eagle, has_window = rng.random() < 0.4, rng.random() < 0.3
        # With EAGLE the second checkpoint of windows is elsewhere where block sizes differ (docs/vllm-differences.md).
        if has_window and not self.eagle:
            specs.append(window())
        sizes, self.state_size = [spec.block_size for spec in specs], size
        block = lcm(*sizes)
        # Where every state is cached kvjax leaves out those of lengths that no hit has (docs/vllm-differences.md).
        intervals = (0, 2 * block) if size % sizes[0] else (None, 0, 0, 2 * block)
        interval = rng.choice(intervals)
        if not has_states:
            interval = rng.choice((0, 2 * block)) if has_window and not self.eagle else None
        groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
        config = KVCacheConfig(
            num_blocks=rng.choice((60, 120, 400)),
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=interval,
        )
        options = {
            "scheduler_block_size": block,
            "hash_block_size": HASH_BLOCK,
            "enable_caching": True,
            "use_eagle": self.eagle,
            "enable_mamba_shared_prefix_checkpoint": rng.random() < 0.5,
        }
        kinds = [type(spec).__name__ for spec in specs]
        self.name = f"{kinds}, {sizes}, {checkpoints} checkpoint blocks, {drafts} drafts, EAGLE {self.eagle}"
        self.name += f", interval {interval}"
        self.managers = [make(config, MAX_MODEL_LEN, **options) for make in (OwnManager, KVCacheManager)]
        own = self.managers[0]
        is_fine = own.coordinator.enable_partial_hash_hits
        self.compares_ids = (is_fine and not drafts) or not has_states
        self.split_options = SimpleNamespace(
            block_size=block,
            cache_config=SimpleNamespace(block_size=size),
            scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
            max_num_scheduled_tokens=96,
            use_eagle_block_drop=self.eagle,
            num_hash_lookahead_tokens=0,
            hash_block_size=HASH_BLOCK,
            mamba_partial_cache_hit=is_fine,
            mamba_shared_prefix_checkpoint=own.mamba_shared_prefix_checkpoint,
            mamba_has_prefill_checkpoint_blocks=checkpoints > 0,
            mamba_prefill_checkpoint_alignment=HASH_BLOCK if checkpoints else None,
        )
        self.running: list[Any] = []
        self.num_requests = 0
        trunk = [rng.randrange(50) for _ in range(300)]
        self.prompts = [trunk[: rng.randrange(8, 240)] + [100 + i] * rng.randrange(1, 30) for i in range(6)]
        self.counts: Counter[str] = Counter()

    def both(self, call: str, *args: Any, **named: Any) -> list[Any]:
        self.counts["calls"] += 1
        self.counts[call] += 1
        return [getattr(manager, call)(*args, **named) for manager in self.managers]

    def ids(self, blocks: Any) -> Any:
        if blocks is None:
            return None
        found = blocks.get_block_ids()
        return found if self.compares_ids else tuple([block_id > 0 for block_id in group] for group in found)

    def expect(self, what: str, own: Any, ours: Any) -> None:
        if own != ours:
            raise AssertionError(f"{what}: vLLM {own}, kvjax {ours}")

    def look_up(self, request: Any) -> tuple[list[Any], int]:
        own, ours = self.both("get_computed_blocks", request)
        self.expect("hit", (self.ids(own[0]), *own[1:]), (self.ids(ours[0]), *ours[1:]))
        self.counts["hits"] += own[1] > 0
        self.counts["hits inside blocks"] += own[1] % self.split_options.cache_config.block_size > 0
        request.shared_prefix_boundary = own[2]
        return [own[0], ours[0]], own[1]

    def allocate(self, request: Any, new: int, length: int = 0, hits: list[Any] | None = None) -> bool:
        lookahead = 2 if self.eagle and self.rng.random() < 0.5 else 0
        self.counts["calls"] += 1
        answers = [
            manager.allocate_slots(request, new, length, None if hits is None else hit, num_lookahead_tokens=lookahead)
            for manager, hit in zip(self.managers, hits or (None, None), strict=True)
        ]
        self.expect("new blocks", *[self.ids(blocks) for blocks in answers])
        return answers[0] is not None

    def step(self) -> None:
        """One step of the scheduler, and what the worker is told."""
        self.both("new_step_starts")
        planned = []
        for request in list(self.running):
            if request.num_computed_tokens == request.num_tokens:
                request.append_output_token_ids([self.rng.randrange(50)])
            left = request.num_tokens - request.num_computed_tokens
            new = self.split(request, min(left, self.rng.choice((96, 40, 24))))
            if not new:
                continue
            if request.num_tokens > MAX_MODEL_LEN - 40 or self.rng.random() < 0.05 or not self.allocate(request, new):
                self.both("free", request)
                self.running.remove(request)
                if not self.has_states and request.num_tokens <= MAX_MODEL_LEN - 40:
                    request.num_computed_tokens = 0
                    self.preempted.append(request)
            else:
                planned.append((request, new))
        for _ in range(self.rng.randrange(3)):
            self.admit(planned)
        self.compare()
        for request, new in planned:
            request.num_computed_tokens += new

    def split(self, request: Any, most: int, length: int = 0) -> int:
        """New tokens of the scheduler's step, as far as the block that it begins inside (docs/vllm-differences.md)."""
        if not self.has_states:
            return most
        new, size = Scheduler._mamba_block_aligned_split(self.split_options, request, most, length), self.state_size
        inside = (request.num_computed_tokens + length) % size
        return min(new, size - inside) if inside and most > 1 else new

    def admit(self, planned: list[tuple[Any, int]]) -> None:
        request = self.preempted.pop() if self.preempted and self.rng.random() < 0.5 else self.new_request()
        hits, length = self.look_up(request)
        left = request.num_tokens - length
        new = self.split(request, min(left, 96), length)
        if new and self.allocate(request, new, length, hits):
            self.running.append(request)
            request.num_computed_tokens = length
            planned.append((request, new))

    def new_request(self) -> Any:
        self.num_requests += 1
        tokens = self.rng.choice(self.prompts) + [self.rng.randrange(50) for _ in range(self.rng.randrange(4))]
        return make_request(f"r{self.num_requests}", tokens, hasher=HASHER)

    def compare(self) -> None:
        """Tables, copies, offers and free blocks."""
        for request in self.running:
            own, ours = (manager.get_blocks(request.request_id) for manager in self.managers)
            self.expect(f"table of {request.request_id}", self.ids(own), self.ids(ours))
        (own, held), (ours, lent) = self.both("take_kv_cache_block_copies")
        if self.compares_ids:
            self.expect("copies", sorted(resolved(own)), sorted(map(tuple, ours)))
        self.expect("number of copies", len(own), len(ours))
        self.counts["copies"] += len(own)
        for manager, blocks in zip(self.managers, (held, lent), strict=True):
            manager.block_pool.free_blocks(sorted(blocks, key=lambda block: block.block_id))
        offers = self.both("take_boundary_state_offloads")
        if self.compares_ids:
            self.expect("offers", *[{name: sorted(each) for name, each in one.items()} for one in offers])
        self.expect("free blocks", *[manager.block_pool.get_num_free_blocks() for manager in self.managers])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    init_none_hash(sha256_cbor)
    counts: Counter[str] = Counter()
    failed: list[str] = []
    seed = args.seed
    while counts["calls"] < args.calls:
        pair = Pair(random.Random(seed), has_states=seed % 4 > 0)
        try:
            while pair.counts["calls"] < CALLS_PER_MODEL:
                pair.step()
        except AssertionError as error:
            failed.append(f"seed {seed}, {pair.name}, after {pair.counts['calls']} calls: {error}")
        counts += pair.counts
        counts["models"] += 1
        seed += 1
    print("\n".join(f"differs: {each[:400]}" for each in failed[:20]))
    print(f"{len(failed)} of {counts['models']} models differ; {dict(counts)}")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())

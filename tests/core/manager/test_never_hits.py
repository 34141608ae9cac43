"""A warning where no prompt can ever hit: iff one that is repeated alone in an empty cache never does."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from math import lcm
from typing import Any

import numpy as np
import pytest

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
    ManagerOptions,
    ReleaseRules,
    Request,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from kvjax.core.eviction import EVICTION_POLICIES
from kvjax.core.kinds.unshared import ReplayedWindowMLASpec, RequestBufferSpec
from kvjax.errors import NeverHitsWarning

RARE = (863, 1901, 3100, 6571, 6718, 7822, 8237, 8904)  # seeds: a shared prefix, a longer prompt that fits alone, ...
HASHER = BlockHasher(2, "xxhash_cbor", seed="0")


@dataclass(frozen=True)
class Deployment:
    specs: tuple[KVCacheSpec, ...]
    pools: tuple[int, ...]  # of each spec
    sizes: tuple[int, ...]  # blocks of each pool
    is_eagle: tuple[bool, ...]
    options: dict[str, Any]

    def manager(self) -> KVCacheManager:
        groups = zip(self.specs, self.pools, self.is_eagle, strict=True)
        config = KVCacheConfig(
            tuple(KVCachePoolSpec(size) for size in self.sizes),
            tuple(KVCacheGroupSpec((f"{i}",), *group) for i, group in enumerate(groups)),
        )
        return KVCacheManager(config, hash_block_size=2, **self.options)

    def hits(self, num_tokens: int) -> int:
        """Most tokens that a prompt hits which is repeated three times, alone."""
        manager, most = self.manager(), 0
        budget = self.options["max_in_flight_tokens"] or self.options["max_model_len"]
        for number in range(4):
            request = Request(str(number), list(range(num_tokens)), block_hasher=HASHER, cache_salt="names the input")
            blocks, hit = manager.get_computed_blocks(request)
            most, start = max(most, hit), (hit, blocks)
            while left := num_tokens - request.num_computed_tokens - start[0] * (request.row < 0):
                given = start if request.row < 0 else ()
                step = manager.limit_step(request, min(left, budget), *given)
                if step < 1 or manager.allocate_slots(request, step, *given) is None:
                    return most
                request.num_computed_tokens += step + sum(given[:1])
                manager.new_step_starts()
            manager.free(request)
        return most


def random_spec(rng: np.random.Generator) -> KVCacheSpec:
    size: dict[str, Any] = {"block_size": int(rng.choice([2, 2, 4, 6]))}
    heads = {"num_kv_heads": 1, "head_size": 8, "dtype": "float32"} | size
    kind = rng.choice(
        ["full", "window", "chunk", "state", "cross", "buffer", "replayed", "sink"],
        p=[0.3, 0.25, 0.12, 0.17, 0.04, 0.04, 0.04, 0.04],
    )
    if kind == "window":
        return SlidingWindowSpec(
            sliding_window=int(rng.integers(1, 9)), num_sink_tokens=int(rng.choice([0, 0, 3])), **heads
        )
    if kind == "chunk":
        return ChunkedLocalAttentionSpec(attention_chunk_size=int(rng.choice([2, 4, 6, 8])), **heads)
    if kind == "state":
        mode, drafts = str(rng.choice(["align", "align", "align", "none"])), int(rng.choice([0, 0, 2]))
        return MambaSpec(
            shapes=((4,),), dtypes=("float32",), mamba_cache_mode=mode, num_speculative_blocks=drafts, **size
        )
    if kind == "cross":
        return CrossAttentionSpec(max_num_encoder_tokens=4, **heads)
    if kind == "buffer":
        return RequestBufferSpec(num_bytes=8, **size)
    if kind == "replayed":
        return ReplayedWindowMLASpec(sliding_window=4, head_size=8, dtype="float32", **size)
    return SinkFullAttentionSpec(sink_len=size["block_size"], **heads) if kind == "sink" else FullAttentionSpec(**heads)


def random_deployment(seed: int) -> Deployment:
    rng = np.random.default_rng(seed)
    specs = tuple(random_spec(rng) for _ in range(rng.integers(1, 4)))
    drawn = rng.integers(0, rng.integers(1, len(specs) + 1), len(specs)).tolist()
    pools = tuple(sorted(set(drawn)).index(pool) for pool in drawn)
    most_blocks = rng.choice([6, 12, 40, 200])
    alignment = lcm(*(spec.block_size for spec in specs))
    use_eagle = bool(rng.random() < 0.3)
    options = {
        "max_model_len": int(rng.integers(2, 60)),
        "use_eagle": use_eagle,
        "eviction_policy": str(rng.choice(EVICTION_POLICIES)),
        "retention_interval": [None, None, 0, alignment, 3 * alignment, "auto"][rng.integers(6)],
        "rules": ReleaseRules(retention_ends=str(rng.choice(["all", "vllm-0.32", "vllm-0.33"]))),
        "same_step_hits": bool(rng.random() < 0.5),
        "max_in_flight_tokens": [None, None, 3, 8][rng.integers(4)],
    }
    return Deployment(
        specs,
        pools,
        tuple(rng.integers(2, most_blocks, max(pools) + 1).tolist()),
        tuple(bool(use_eagle and rng.random() < 0.3) for _ in specs),
        options,
    )


def check_law(seed: int) -> str:
    """What a random deployment is: refused, one that hits, or one that never does."""
    deployment = random_deployment(seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NeverHitsWarning)
        try:
            deployment.manager()
        except (ValueError, NotImplementedError):
            return "refused"
    warned = [str(warning.message) for warning in caught if warning.category is NeverHitsWarning]
    hits = any(deployment.hits(num_tokens) for num_tokens in range(1, deployment.options["max_model_len"] + 1))
    assert len(warned) == (not hits), (seed, deployment, warned)
    return "hits" if hits else "never"


def test_a_warning_comes_iff_a_prompt_repeated_alone_never_hits() -> None:
    met = [check_law(seed) for seed in (*range(100), *RARE)]
    assert min(met.count("hits"), met.count("never")) > 30


@pytest.mark.sweep
@pytest.mark.parametrize("start", range(1_000, 21_000, 1_000))
def test_of_many_deployments(start: int) -> None:
    for seed in range(start, start + 1_000):
        check_law(seed)


FULL = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
STATE = MambaSpec(block_size=4, shapes=((4,),), dtypes=("float32",), mamba_cache_mode="align")
NO_STATE = MambaSpec(block_size=4, shapes=((4,),), dtypes=("float32",))


@pytest.mark.parametrize(
    ("specs", "options", "message"),
    [
        ((RequestBufferSpec(block_size=2, num_bytes=8),), {}, "no group has blocks that another request may use"),
        ((FULL, NO_STATE), {}, r"groups \(1,\) keep one state a request; expected mamba_cache_mode align, got none"),
        ((FULL, STATE), {"max_in_flight_tokens": 3}, "at most 3 tokens .* expected max_in_flight_tokens >= 4"),
        ((FULL,), {"max_model_len": 4}, "multiples of 4 tokens .* longer max_model_len, got 4"),
        ((FULL,), {"max_model_len": 8, "use_eagle": True}, "of prompts of at least 5 more; .* max_model_len, got 8"),
        (
            (FULL, STATE),
            {"max_model_len": 7, "use_eagle": True, "options": ManagerOptions.vllm("0.22.1")},
            "no request of 7 tokens|multiples of 4",
        ),
        ((FULL,), {"num_blocks": 2}, "pool 0 has 1 blocks, and the shortest prompt that may hit, of 5 tokens, takes 2"),
    ],
)
def test_the_warning_says_why(specs: tuple[KVCacheSpec, ...], options: dict[str, Any], message: str) -> None:
    options = {"max_model_len": 32, "max_in_flight_tokens": None} | options
    sizes = (options.pop("num_blocks", 40),)
    with pytest.warns(NeverHitsWarning, match=message) as caught:
        Deployment(specs, (0,) * len(specs), sizes, (False,) * len(specs), options).manager()
    assert len(caught) == 1


def test_nothing_is_said_where_caching_is_off() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", NeverHitsWarning)
        Deployment((NO_STATE,), (0,), (40,), (False,), {"max_model_len": 32, "enable_caching": False}).manager()


@pytest.mark.parametrize("is_eagle", [(True, True), (True, False)])
def test_a_prompt_of_one_step_leaves_a_state_that_it_can_hit_under_eagle(is_eagle: tuple[bool, ...]) -> None:
    """The longest that there can be: EAGLE drops a block, which may hold the last token."""
    options = {"max_model_len": 40, "use_eagle": True, "max_in_flight_tokens": None, "retention_interval": None}
    deployment = Deployment((FULL, STATE), (0, 0), (60,), is_eagle, options)
    for num_tokens in range(8, 40):
        assert deployment.hits(num_tokens) == (num_tokens - 4) // 4 * 4

"""What defaults find of prompts that come again changed, that share a beginning, and that take turns.

Law of each: what is promised in docs/eviction.md, whatever kind of layers stands beside full attention.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.core import (
    BlockHasher,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheManager,
    KVCacheSpec,
    MambaSpec,
    Request,
    SlidingWindowSpec,
)
from tests.core.manager.prefill import compute_prompt

SIZE, STEP = 16, 8_192
HEADS = {"block_size": SIZE, "num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
HASHER = BlockHasher(SIZE, "xxhash_cbor", seed="0")
STATE = MambaSpec(block_size=SIZE, shapes=((4, 2),), dtypes=("float32",), mamba_cache_mode="align")
KINDS: dict[str, tuple[KVCacheSpec, int]] = {  # and the blocks of a checkpoint of 5,000 tokens
    "window": (SlidingWindowSpec(sliding_window=1_024, **HEADS), 64),
    "short window": (SlidingWindowSpec(sliding_window=128, **HEADS), 8),
    "chunk": (ChunkedLocalAttentionSpec(attention_chunk_size=8_192, **HEADS), 313),
    "state": (STATE, 1),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def make_manager(kind: str, num_blocks: int) -> KVCacheManager:
    config = KVCacheConfig.single_pool(num_blocks, FullAttentionSpec(**HEADS), KINDS[kind][0])
    return KVCacheManager(config, 16_384, SIZE)


def serve(manager: KVCacheManager, name: str, tokens: np.ndarray) -> int:
    """Computes a prompt in steps of at most `STEP` tokens and frees it; the tokens of its hit."""
    request = Request(name, tokens, block_hasher=HASHER)
    hit = compute_prompt(manager, request, STEP)
    manager.new_step_starts()
    manager.free(request)
    return hit


def random_tokens(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 10_000, count)


@every_kind
def test_a_prompt_edited_near_its_end_hits_up_to_there(kind: str) -> None:
    """In memory that is idle; recurrent states have a checkpoint every 512 tokens."""
    tokens = random_tokens(0, 5_980)
    for back in range(1, 65):
        manager = make_manager(kind, 4_000)
        serve(manager, "first", tokens)
        edited = tokens.copy()
        edited[-back] += 1
        hit = serve(manager, "edited", edited)
        assert hit == (5_980 - back) // SIZE * SIZE if kind != "state" else hit >= 5_632


@every_kind
def test_a_shared_beginning_is_hit_once_it_is_known_to_be_shared(kind: str) -> None:
    """By all but the first of 64 requests, and the second one where a state has to be computed there."""
    manager, shared = make_manager(kind, 8_000), random_tokens(1, 480)
    hits = [serve(manager, f"r{i}", np.append(shared, random_tokens(100 + i, 300))) for i in range(64)]
    assert hits[2:] == [480] * 62
    assert (hits[1] == 480) == (kind != "state")


@every_kind
@pytest.mark.parametrize(
    ("num_sessions", "room"),
    [(8, 1.2), *(pytest.param(24, room, marks=pytest.mark.sweep) for room in (2.0, 1.2, 1.05))],
)
def test_sessions_in_turns_find_what_they_repeat(kind: str, num_sessions: int, room: float) -> None:
    """At least 99 % of it, in a pool of `room` times what their last turns and checkpoints take."""
    manager = make_manager(kind, int(num_sessions * room * (5_020 // SIZE + 1 + KINDS[kind][1])) + 2)
    sessions = [random_tokens(i, 5_000) for i in range(num_sessions)]
    for i, tokens in enumerate(sessions):
        serve(manager, f"{i}.0", tokens)
    hit = repeated = 0
    for turn in range(1, 4):
        for i in range(num_sessions):
            repeated += sessions[i].size
            sessions[i] = np.append(sessions[i], random_tokens(1_000 * turn + i, 5))
            hit += serve(manager, f"{i}.{turn}", sessions[i])
    assert hit >= 0.99 * repeated


def test_what_a_running_request_let_go_lasts_as_long_as_its_end() -> None:
    """The window before a prompt's end is given back while the answer grows, and other requests come and go."""
    manager, prompt = make_manager("short window", 400), random_tokens(7, 1_000)
    request = Request("long", prompt, block_hasher=HASHER)
    assert manager.allocate_slots(request, 1_000) is not None
    request.num_computed_tokens = 1_000
    for token in range(160):
        if token % 8 == 0:
            serve(manager, f"other {token}", random_tokens(50 + token, 128))
        request.append_output_token_ids([token])
        manager.new_step_starts()
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
    manager.free(request)
    for i in range(8):
        serve(manager, f"later {i}", random_tokens(900 + i, 128))
    assert serve(manager, "again", prompt) == 992

"""Families with recurrent layers, paged: chunks and prefix hits give the logits of whole sequences.

What Hugging Face computes of them, the goldens say.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from kvjax.core import KVCacheManager
from kvjax.core.kinds.state_steps import StateSteps
from tests.models.recurrent_models import MODELS, STATE_BLOCK, VOCAB, serve, step_of

NUM_TOKENS = 8
CLOSE = {"atol": 1e-4, "rtol": 0.0}


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


@functools.cache
def recomputed(name: str, tokens: tuple[int, ...]) -> np.ndarray:  # float32[NUM_TOKENS, VOCAB]
    """Logits of greedy tokens, each from the whole sequence over fresh pages."""
    found: list[np.ndarray] = []
    for _ in range(NUM_TOKENS):
        server = serve(name)
        server.run({"whole": list(tokens)}, 1, budget=56)
        found.append(server.logits["whole"][0])
        tokens = (*tokens, int(found[-1].argmax()))
    return np.array(found)


def assert_hits_are_right(name: str, budget: int) -> None:
    """A request whose first block of states an earlier one left goes on as if it had computed it."""
    server, shared = serve(name), prompt(0, STATE_BLOCK[name] + 9)
    tokens = shared[: STATE_BLOCK[name]] + prompt(1, 7)
    assert server.run({"a": shared}, 1, budget) == {"a": 0}
    assert server.run({"b": tokens}, NUM_TOKENS, budget) == {"b": STATE_BLOCK[name]}
    np.testing.assert_allclose(server.logits["b"], recomputed(name, tuple(tokens)), **CLOSE)


@pytest.mark.parametrize("name", MODELS)
def test_states_and_kv_have_pools_and_the_blocks_hold_as_much(name: str) -> None:
    groups = step_of(name).kv_cache_config.kv_cache_groups
    states = [group for group in groups if group.kv_cache_spec.state_pages is not None]
    assert {group.kv_cache_spec.block_size for group in states} == {STATE_BLOCK[name]}
    assert len({group.pool_id for group in groups}) == 2


@pytest.mark.parametrize("name", MODELS)
def test_chunks_of_any_size_give_the_logits_of_whole_sequences(name: str) -> None:
    """Requests together: one in a chunk, one in chunks that split blocks of K and V, one of a single token."""
    server, length = serve(name), STATE_BLOCK[name]
    prompts = {"a": prompt(2, length + 13), "b": prompt(3, length - 3), "c": prompt(4, 1)}
    server.run(prompts, NUM_TOKENS, budget=length + 1)
    for request_id, tokens in prompts.items():
        np.testing.assert_allclose(server.logits[request_id], recomputed(name, tuple(tokens)), **CLOSE)


@pytest.mark.parametrize("name", MODELS)
def test_a_hit_goes_on_from_the_cached_state(name: str) -> None:
    assert_hits_are_right(name, budget=STATE_BLOCK[name])


@pytest.mark.parametrize("name", MODELS)
def test_a_state_of_the_wrong_length_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that do not end where a block of states ends leave it with the state of fewer tokens than it stands for."""

    monkeypatch.setattr(KVCacheManager, "limit_step", lambda self, request, num_new, *hit: num_new)
    monkeypatch.setattr(StateSteps, "check", lambda self, num_computed, after: None)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_hits_are_right(name, budget=STATE_BLOCK[name] - 5)

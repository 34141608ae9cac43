"""A trace cut into pieces says what its tokens say."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.replay import TraceRequest
from kvjax.replay.bounds import PromptTree
from kvjax.replay.bounds.pieces import CHECKPOINT_TOKENS, ROOT
from tests.replay.random_traces import random_trace


@pytest.mark.parametrize("hash_block_size", [3, 64, 511, 512, 1_000])
@pytest.mark.parametrize("seed", range(4))
def test_two_prompts_share_the_pieces_that_hold_equal_prefixes(seed: int, hash_block_size: int) -> None:
    """Up to the end of any piece of one, the other has it if its tokens up to there are equal, and only then."""
    trace = random_trace(seed, 25, hash_block_size=hash_block_size)
    tree = PromptTree.of(trace)
    tokens = [request.token_ids() for request in trace]
    for path, prompt in zip(tree.paths, tokens, strict=True):
        for other_path, other in zip(tree.paths, tokens, strict=True):
            for piece in path:
                end = tree.ends[piece]
                assert (piece in other_path) == (other.size >= end and np.array_equal(prompt[:end], other[:end]))


@pytest.mark.parametrize("hash_block_size", [3, 64, 511, 512, 1_000])
@pytest.mark.parametrize("checkpoint_tokens", [CHECKPOINT_TOKENS, 96])
def test_pieces_end_where_prompts_end_a_token_before_and_at_checkpoints(
    hash_block_size: int, checkpoint_tokens: int
) -> None:
    trace = random_trace(1, 40, hash_block_size=hash_block_size)
    tree = PromptTree.of(trace, checkpoint_tokens)
    assert tree.prompt_tokens == sum(request.input_length for request in trace)
    for path, num_hittable, request in zip(tree.paths, tree.num_hittable, trace, strict=True):
        ends = [tree.ends[piece] for piece in path]
        assert [tree.start(piece) for piece in path] == [0, *ends[:-1]]
        assert [tree.parents[piece] for piece in path] == [ROOT, *path[:-1]]
        assert sum(tree.size(piece) for piece in path) == ends[-1] == request.input_length
        assert [0, *ends][num_hittable] == request.input_length - 1
        assert set(range(checkpoint_tokens, request.input_length, checkpoint_tokens)) <= set(ends)


def test_a_prompt_of_one_token_can_hit_nothing() -> None:
    assert PromptTree.of([TraceRequest(0, 1, 0, (0,))]).num_hittable == [0]

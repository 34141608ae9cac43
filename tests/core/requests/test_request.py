"""Requests without a table: their prompt, hashes that grow with them, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.core.hashing.block_hash import ALGORITHMS, BlockHasher
from kvjax.core.hashing.extra_keys import EXTRA_KEY_STYLES, ExtraKeys
from kvjax.core.record.recorded_request import decode_request, encode_request
from kvjax.core.requests.request import LoRARequest, MultiModalFeature, Request
from tests.core.hashing.plain_hashing import plain_hashes

HASHER = BlockHasher(4, seed="s")


def test_a_new_request() -> None:
    request = Request("r", [5, 6, 7], block_hasher=HASHER)
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (3, 3, 0)
    assert (request.num_computed_tokens, request.num_preemptions, request.row) == (0, 0, -1)
    assert request.token_ids.tolist() == request.prompt_token_ids.tolist() == [5, 6, 7]
    assert request.all_token_ids.tolist() == [5, 6, 7]
    assert request.token_ids.dtype == np.int32
    assert request.block_hashes == []
    assert repr(request) == "Request('r', 3 prompt + 0 output tokens, 0 computed, row -1)"


def test_the_prompt_is_copied_and_views_cannot_be_written() -> None:
    prompt = np.arange(6, dtype=np.int32)
    request = Request("r", prompt)
    prompt[0] = 9
    assert request.token_ids.tolist() == [0, 1, 2, 3, 4, 5]
    for view in (request.token_ids, request.prompt_token_ids, request.output_token_ids):
        assert not view.flags.writeable


@given(st.lists(st.lists(st.integers(0, 150_000), max_size=9), max_size=8), st.sampled_from(ALGORITHMS))
def test_hashes_grow_in_one_list(runs: list[list[int]], algorithm: str) -> None:
    hasher = BlockHasher(4, algorithm, seed="s")
    request = Request("r", [1, 2, 3], block_hasher=hasher)
    hashes, tokens = request.block_hashes, [1, 2, 3]
    for run in runs:
        request.append_output_token_ids(run[0] if len(run) == 1 else run)
        tokens += run
        assert request.token_ids.tolist() == tokens
        assert request.output_token_ids.tolist() == tokens[3:]
        assert request.block_hashes is hashes
        assert hashes == plain_hashes(algorithm, hasher.none_hash, tokens, 4)


def test_without_a_hasher_there_are_no_hashes() -> None:
    request = Request("r", range(100), lora=LoRARequest("l"))
    request.append_output_token_ids(np.arange(50))
    assert request.block_hashes == []


@pytest.mark.parametrize("style", EXTRA_KEY_STYLES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_hashes_cover_the_extra_keys(algorithm: str, style: str) -> None:
    hasher = BlockHasher(4, algorithm, seed="s", extra_key_style=style)
    features: dict[str, Any] = {
        "mm_features": [MultiModalFeature("a", 1, 5), MultiModalFeature("b", 9, 2)],
        "lora": LoRARequest("l", "p"),
        "cache_salt": "salt",
        "prompt_embeds": np.arange(22, dtype=np.float32).reshape(11, 2),
    }
    request = Request("r", range(11), block_hasher=hasher, **features)
    request.append_output_token_ids(range(11, 17))
    keys = ExtraKeys(**features, style=style)
    extra_keys = [keys.of_block(start, start + 4) for start in range(0, 16, 4)]
    assert request.block_hashes == plain_hashes(algorithm, hasher.none_hash, range(17), 4, extra_keys)
    assert request.has_extra_keys


def test_event_keys_of_coarse_blocks() -> None:
    features: dict[str, Any] = {"mm_features": [MultiModalFeature("a", 1, 8)], "cache_salt": "s"}
    request = Request("r", range(20), block_hasher=HASHER, **features)
    assert request.event_extra_keys(0, 3, 8) == [(("a", 1), "s"), (("a", -7),), None]
    assert request.event_extra_keys(1, 3, 4) == [(("a", -3),), (("a", -7),)]
    assert Request("r", range(20)).event_extra_keys(0, 2, 4) == [None, None]
    assert Request("r", range(20)).event_extra_keys(3, 4, 4) == [None]
    assert not Request("r", range(20)).has_extra_keys
    request.append_output_token_ids(range(4))
    assert len(request.block_hashes) == 6


def test_embeddings_stand_in_for_a_prompt() -> None:
    request = Request("r", None, prompt_embeds=np.zeros((5, 3), np.float32), block_hasher=HASHER)
    assert request.prompt_token_ids.tolist() == [0] * 5
    other = Request("r", None, prompt_embeds=np.ones((5, 3), np.float32), block_hasher=HASHER)
    assert request.block_hashes != other.block_hashes


@pytest.mark.parametrize(("logprobs", "skip"), [(None, False), (0, True), (5, True)])
def test_prompt_logprobs_keep_hits_from_being_read(logprobs: int | None, skip: bool) -> None:
    assert Request("r", [1], prompt_logprobs=logprobs).skip_reading_prefix_cache is skip
    assert Request("r", [1], prompt_logprobs=logprobs, skip_reading_prefix_cache=True).skip_reading_prefix_cache


def test_computed_tokens_can_be_set() -> None:
    request = Request("r", [1, 2])
    request.num_computed_tokens = 2
    assert request.num_computed_tokens == 2
    with pytest.raises(ValueError, match="request 'r': expected num_computed_tokens >= 0, got -1"):
        request.num_computed_tokens = -1
    assert request.num_computed_tokens == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_token_ids": []}, "expected at least one prompt token, got an empty prompt"),
        ({"prompt_token_ids": [1, -1]}, "expected prompt_token_ids >= 0, got -1 at index 1"),
        ({"prompt_token_ids": [1.5]}, "expected integer prompt_token_ids, got float64"),
        ({"prompt_token_ids": None}, "expected prompt_token_ids as a row of integers"),
        ({"prompt_token_ids": [2**31]}, "expected prompt_token_ids <= 2147483647, got 2147483648"),
        ({"cache_salt": ""}, "expected a cache_salt that is not empty"),
        (
            {"mm_features": [MultiModalFeature("a", 2, 2)]},
            r"item 'a': expected it to end within the prompt's 3 tokens, got tokens \[2, 4\)",
        ),
        ({"prompt_embeds": np.zeros((2, 4))}, r"expected prompt_embeds \[3, hidden\], got shape \[2, 4\]"),
        ({"prompt_embeds": 1.0, "prompt_token_ids": None}, r"expected prompt_token_ids as a row of integers"),
        ({"prompt_embeds": [1.0, 2.0, 3.0]}, r"expected prompt_embeds \[3, hidden\], got shape \[3\]"),
        ({"prompt_embeds": np.zeros(3)}, r"expected prompt_embeds \[3, hidden\], got shape \[3\]"),
        ({"checkpoints": [2, 0]}, r"expected checkpoints behind 1 to 3 tokens, those of the prompt, got \[0, 2\]"),
        ({"checkpoints": [4]}, r"expected checkpoints behind 1 to 3 tokens, those of the prompt, got \[4\]"),
        ({"checkpoints": [1.0]}, r"expected checkpoints as integers, got \[1.0\]"),
        ({"checkpoints": 3}, "expected checkpoints as integers, got 3"),
        ({"prompt_token_ids": range(99), "checkpoints": range(1, 67)}, "expected at most 64 checkpoints, got 66"),
    ],
)
def test_bad_prompts_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Request("r", **{"prompt_token_ids": [1, 2, 3], **arguments})


def test_checkpoints_are_in_order_and_go_with_the_request() -> None:
    request = Request("r", range(9), checkpoints=np.array([7, 2, 7]))
    assert request.checkpoints == request.fork("s").checkpoints == (2, 7)
    assert decode_request("t", encode_request(request)).checkpoints == (2, 7)


@pytest.mark.parametrize("tokens", [-1, 1.5, [1, -1], ["a"], 2**31, [[1]]])
def test_a_refused_token_changes_nothing(tokens: Any) -> None:
    request = Request("r", range(7), block_hasher=HASHER)
    hashes = list(request.block_hashes)
    with pytest.raises(ValueError, match="expected"):
        request.append_output_token_ids(tokens)
    assert request.token_ids.tolist() == list(range(7))
    assert request.block_hashes == hashes

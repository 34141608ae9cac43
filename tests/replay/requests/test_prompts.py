"""Prompts made with remembered hashes are the prompts made without."""

from __future__ import annotations

import pytest

from kvjax.core.hashing.block_hash import BlockHasher
from kvjax.core.requests.request import Request
from kvjax.replay.requests.prompts import PromptMaker
from tests.replay.random_traces import random_trace


@pytest.mark.parametrize("hash_block_size", [64, 512])
@pytest.mark.parametrize("block_size", [16, 48, 512, 1024])
@pytest.mark.parametrize("seed", range(4))
def test_hashes_are_those_of_the_tokens(seed: int, block_size: int, hash_block_size: int) -> None:
    trace = random_trace(seed, 80, hash_block_size=hash_block_size)
    hasher = BlockHasher(block_size, "xxhash_cbor", seed="test")
    maker = PromptMaker(trace, hasher)
    for index, source in enumerate(trace):
        made = maker.make(str(index), source)
        plain = Request(str(index), source.token_ids(), block_hasher=hasher)
        assert made.block_hashes == plain.block_hashes
        assert made.token_ids.tolist() == plain.token_ids.tolist()
        made.append_output_token_ids(list(range(block_size)))
        plain.append_output_token_ids(list(range(block_size)))
        assert made.block_hashes == plain.block_hashes


def test_hashes_are_remembered_only_while_they_will_be_asked_for() -> None:
    trace = random_trace(0, 80)
    maker = PromptMaker(trace, BlockHasher(16, "xxhash_cbor", seed="test"))
    for index, source in enumerate(trace):
        maker.make(str(index), source)
    assert maker._known == {}


@pytest.mark.parametrize("hash_block_size", [64, 512])
@pytest.mark.parametrize("block_size", [16, 48, 512])
@pytest.mark.parametrize("seed", range(4))
def test_every_block_is_hashed_once(
    seed: int, block_size: int, hash_block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hash_tokens, hashed = BlockHasher.hash_tokens, []

    def noted(*args) -> list[bytes]:
        found = hash_tokens(*args)
        hashed.extend(found)
        return found

    monkeypatch.setattr(BlockHasher, "hash_tokens", noted)
    trace = random_trace(seed, 80, hash_block_size=hash_block_size)
    maker = PromptMaker(trace, BlockHasher(block_size, "xxhash_cbor", seed="test"))
    for index, source in enumerate(trace):
        maker.make(str(index), source)
    assert len(hashed) == len(set(hashed))

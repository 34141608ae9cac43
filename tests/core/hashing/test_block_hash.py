"""Laws of block hashes: the published golden values, and equality with plain encoders at every width and size."""

from __future__ import annotations

import pickle
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.core.hashing.block_hash import (
    ALGORITHMS,
    BlockHash,
    BlockHasher,
    BlockHashListWithBlockSize,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)
from kvjax.core.hashing.extra_keys import ExtraKeys, LoRARequest, MultiModalFeature
from tests.core.hashing.plain_hashing import hash_value, plain_hashes

# NONE_HASH and first block of sha256_cbor, as vLLM 0.33 computes them (cbor2 6.2.1).
GOLDEN_NONE_HASH = "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"
GOLDEN_NONE_HASH_SEED_0 = "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e"
GOLDEN_FIRST_BLOCK = "58d0879dff3800f65f8c5fd449d73048c0f7699dd238a03b84b146b151d55111"

MANY_TOKENS = 600  # so many are encoded in bulk, few one by one
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
# Around every change of width in CBOR and pickle, and what int64 can hold.
WIDTH_EDGES = [e for w in (24, 2**8, 2**16, 2**31, 2**32, 2**39, 2**47, 2**63) for e in (w - 1, w) if e < 2**63]


def test_golden_hashes_of_the_default_seed_text() -> None:
    hasher = BlockHasher(4, seed="vllm-none-hash")
    assert hasher.algorithm == "sha256_cbor"
    assert hasher.none_hash.hex() == GOLDEN_NONE_HASH
    assert [h.hex() for h in hasher.hash_tokens(np.array([1, 2, 3, 4]))] == [GOLDEN_FIRST_BLOCK]


def test_golden_none_hash_of_pythonhashseed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    hasher = BlockHasher(4)
    assert hasher.none_hash.hex() == GOLDEN_NONE_HASH_SEED_0
    assert hasher.has_seed
    assert hasher == BlockHasher(4, seed="0")
    assert hash(hasher) == hash(BlockHasher(4, seed="0"))


def test_a_seed_given_outweighs_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert BlockHasher(4, seed="vllm-none-hash").none_hash.hex() == GOLDEN_NONE_HASH


@every_algorithm
def test_without_a_seed_the_hashers_of_a_process_agree(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hasher made for each request finds what earlier requests cached."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    one, other = BlockHasher(2, algorithm), BlockHasher(2, algorithm)
    assert not one.has_seed
    assert len(one.none_hash) == 32
    assert one == other
    tokens = np.arange(9)
    assert one.hash_tokens(tokens) == other.hash_tokens(tokens)
    assert one.hash_tokens(tokens) == plain_hashes(algorithm, one.none_hash, tokens, 2)
    assert one.hash_blocks(tokens[:4].reshape(2, 2), [one.none_hash] * 2) == [
        hash_value(algorithm, (one.none_hash, block, None)) for block in ((0, 1), (2, 3))
    ]


def test_without_a_seed_hashes_are_private_to_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    code = "from kvjax.core import BlockHasher; print(BlockHasher(4).none_hash.hex())"
    there = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert len(bytes.fromhex(there.stdout)) == 32
    assert there.stdout.strip() != BlockHasher(4).none_hash.hex()


@every_algorithm
def test_a_hasher_survives_pickling(algorithm: str) -> None:
    hasher = BlockHasher(4, algorithm)
    copy = pickle.loads(pickle.dumps(hasher))
    assert copy == hasher
    assert copy.hash_tokens(np.arange(8)) == hasher.hash_tokens(np.arange(8))


@every_algorithm
def test_digest_sizes_and_seed_text(algorithm: str) -> None:
    hasher = BlockHasher(4, algorithm, seed="text")
    assert hasher.none_hash == hash_value(algorithm, "text")
    assert len(hasher.none_hash) == hasher.digest_bytes == (32 if algorithm.startswith("sha256") else 16)
    assert hasher.is_cbor == algorithm.endswith("_cbor")


@every_algorithm
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5, 16, 23, 24, 25, 255, 256, 300])
@pytest.mark.parametrize("top", [24, 256, 2**16, 150_000, 2**31, 2**32, 2**63 - 1])
def test_agrees_with_plain_encoders(algorithm: str, block_size: int, top: int) -> None:
    hasher = BlockHasher(block_size, algorithm, seed="s")
    for num_blocks in (3, 3 + MANY_TOKENS // block_size):
        tokens = np.random.default_rng(block_size).integers(0, top, num_blocks * block_size + block_size // 2)
        expected = plain_hashes(algorithm, hasher.none_hash, tokens, block_size)
        assert hasher.hash_tokens(tokens) == expected
        if top <= 2**31:
            assert hasher.hash_tokens(tokens.astype(np.int32)) == expected
            assert hasher.hash_tokens(tokens.astype(np.uint32)) == expected


@every_algorithm
@given(st.lists(st.sampled_from(WIDTH_EDGES) | st.integers(0, 2**63 - 1), max_size=24), st.integers(1, 8))
def test_agrees_with_plain_encoders_at_every_width(algorithm: str, tokens: list[int], block_size: int) -> None:
    hasher = BlockHasher(block_size, algorithm, seed="s")
    for copies in (1, 1 + MANY_TOKENS // max(len(tokens), 1)):
        array = np.array(tokens * copies, np.int64)
        assert hasher.hash_tokens(array) == plain_hashes(algorithm, hasher.none_hash, tokens * copies, block_size)


@every_algorithm
def test_agrees_with_plain_encoders_around_every_change_of_width(algorithm: str) -> None:
    """All edges that a packed code holds, then one that it does not."""
    hasher = BlockHasher(4, algorithm, seed="s")
    for top, copies in product((2**31, 2**32, 2**63), (4, MANY_TOKENS)):
        tokens = np.array([edge for edge in WIDTH_EDGES if edge < top] * copies, np.int64)
        assert hasher.hash_tokens(tokens) == plain_hashes(algorithm, hasher.none_hash, tokens, 4)


@every_algorithm
@pytest.mark.parametrize("block_size", [13_000, 70_000])
def test_a_message_longer_than_a_pickle_frame(algorithm: str, block_size: int) -> None:
    tokens = np.random.default_rng(0).integers(0, 150_000, 2 * block_size)
    hasher = BlockHasher(block_size, algorithm, seed="s")
    expected = plain_hashes(algorithm, hasher.none_hash, tokens, block_size)
    assert hasher.hash_tokens(tokens) == expected
    blocks = tokens.reshape(2, block_size)
    assert hasher.hash_blocks(blocks, [hasher.none_hash, expected[0]]) == expected


@every_algorithm
@pytest.mark.parametrize("salt_len", [10, 59_900, 70_000])
def test_long_extra_keys_agree_with_plain_encoders(algorithm: str, salt_len: int) -> None:
    tokens = np.arange(16)
    keys: list[tuple | None] = [None, (("cache_salt", "x" * salt_len),), None, (b"digest", 5, -5)]
    hasher = BlockHasher(4, algorithm, seed="s")
    expected = plain_hashes(algorithm, hasher.none_hash, tokens, 4, keys)
    assert hasher.hash_tokens(tokens, extra_keys=keys) == expected
    assert hasher.hash_blocks(tokens.reshape(4, 4), [hasher.none_hash, *expected[:3]], keys) == expected


@every_algorithm
def test_a_chain_continues_from_any_parent(algorithm: str) -> None:
    tokens = np.random.default_rng(3).integers(0, 150_000, 64)
    hasher = BlockHasher(4, algorithm, seed="s")
    whole = hasher.hash_tokens(tokens)
    for cut in range(1, 16):
        assert hasher.hash_tokens(tokens[4 * cut :], whole[cut - 1]) == whole[cut:]


@every_algorithm
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(0, 2**32))
def test_growing_token_by_token_equals_hashing_at_once(algorithm: str, cuts: list[int], seed: int) -> None:
    tokens = np.random.default_rng(seed).integers(0, 150_000, sum(cuts))
    items = [MultiModalFeature("a", 1, 5), MultiModalFeature("b", 9, 2)]
    hasher = BlockHasher(3, algorithm, seed="s")
    keys = ExtraKeys(mm_features=items, lora=LoRARequest("l", "p"), cache_salt="salt")
    at_once: list[BlockHash] = []
    hasher.extend(at_once, tokens, keys)
    hashes: list[BlockHash] = []
    again = ExtraKeys(mm_features=items, lora=LoRARequest("l", "p"), cache_salt="salt")
    for end in np.cumsum(cuts):
        before = len(hashes)
        assert hasher.extend(hashes, tokens[:end], again) == len(hashes) - before
        assert len(hashes) == end // 3
    assert hashes == at_once


def test_only_full_blocks_are_hashed() -> None:
    hasher = BlockHasher(4)
    assert [len(hasher.hash_tokens(np.arange(n))) for n in range(10)] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert hasher.hash_tokens(np.array([])) == []
    assert hasher.hash_blocks(np.empty((0, 4), np.int32), []) == []


def test_every_input_changes_the_hash() -> None:
    hasher = BlockHasher(4, seed="s")
    tokens = np.arange(8)
    base = hasher.hash_tokens(tokens)
    changed = tokens.copy()
    changed[0] += 1
    assert not set(base) & set(hasher.hash_tokens(changed))  # the chain carries a change on
    assert not set(base) & set(hasher.hash_tokens(tokens, extra_keys=[("x",), None]))
    assert not set(base) & set(BlockHasher(4, seed="t").hash_tokens(tokens))


def test_a_prompt_of_many_chunks() -> None:
    tokens = np.random.default_rng(0).integers(0, 150_000, 40_000).astype(np.int32)
    hasher = BlockHasher(16, "xxhash_cbor", seed="s")
    assert hasher.hash_tokens(tokens) == plain_hashes("xxhash_cbor", hasher.none_hash, tokens, 16)


def test_packed_keys_hold_hash_and_group() -> None:
    key = make_block_hash_with_group_id(BlockHash(b"hash"), 258)
    assert key == b"hash\x00\x00\x01\x02"
    assert get_block_hash(key) == b"hash"
    assert get_group_id(key) == 258


@pytest.mark.parametrize("group_id", [0, 1, 2**32 - 1])
@pytest.mark.parametrize("size", [0, 16, 32])
def test_packing_is_undone(group_id: int, size: int) -> None:
    key = make_block_hash_with_group_id(BlockHash(bytes(range(size))), group_id)
    assert (get_block_hash(key), get_group_id(key)) == (bytes(range(size)), group_id)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "expected block_size >= 1, got 0"),
        ((4, "md5"), "expected a hash algorithm of sha256, sha256_cbor, xxhash, xxhash_cbor, got 'md5'"),
    ],
)
def test_a_hasher_refuses_what_it_does_not_know(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockHasher(*arguments)
    with pytest.raises(ValueError, match=r"expected an extra key style of vllm-0\.16, .*, got 'old'"):
        BlockHasher(4, extra_key_style="old")
    with pytest.raises(ValueError, match=r"expected seed as text .*, got 0"):
        BlockHasher(4, seed=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.array([1, -2, 3]), "expected tokens >= 0, got -2"),
        (np.array([1.0, 2.0]), r"expected a row of integer tokens, got float64\[2\]"),
        (np.array([[1, 2]]), r"expected a row of integer tokens, got int64\[1, 2\]"),
        (np.array([True, False]), r"expected a row of integer tokens, got bool\[2\]"),
    ],
)
def test_tokens_that_are_none_are_refused(tokens: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockHasher(1).hash_tokens(tokens)


def test_extra_keys_must_match_the_blocks() -> None:
    with pytest.raises(ValueError, match="expected extra_keys for 2 full blocks, got 1"):
        BlockHasher(4).hash_tokens(np.arange(9), extra_keys=[None])


HASHES = [BlockHash(bytes([i])) for i in range(7)]


def test_a_coarse_block_joins_the_fine_hashes() -> None:
    view = BlockHashListWithBlockSize(HASHES, 16, 48)
    assert list(view) == [b"\x00\x01\x02", b"\x03\x04\x05"]
    assert list(BlockHashListWithBlockSize(HASHES, 16, 48, "last")) == [b"\x02", b"\x05"]
    assert list(BlockHashListWithBlockSize(HASHES, 16, 16)) == HASHES
    assert [view[-1], view[-2]] == [view[1], view[0]]


@given(st.integers(0, 12), st.integers(1, 4), st.sampled_from(["concat", "last"]), st.integers(-14, 14))
def test_a_coarse_view_is_a_sequence(size: int, scale: int, mode: str, index: int) -> None:
    hashes = [BlockHash(bytes([i])) for i in range(size)]
    view = BlockHashListWithBlockSize(hashes, 2, 2 * scale, mode)
    pieces = [hashes[i : i + scale] for i in range(0, size - size % scale, scale)]
    expected = [b"".join(piece) if mode == "concat" else piece[-1] for piece in pieces]
    assert len(view) == len(expected)
    assert list(view) == expected
    assert view[:] == expected
    assert view[index:] == expected[index:]
    assert view[::-1] == expected[::-1]
    if -len(expected) <= index < len(expected):
        assert view[index] == expected[index]
    else:
        with pytest.raises(IndexError, match=f"expected an index into {len(expected)} block hashes, got {index}"):
            view[index]


def test_a_coarse_view_follows_its_list() -> None:
    hashes = HASHES[:3]
    view = BlockHashListWithBlockSize(hashes, 1, 2)
    assert len(view) == 1
    hashes.append(HASHES[3])
    assert view[1] == b"\x02\x03"


@pytest.mark.parametrize("sizes", [(16, 24), (16, 8), (16, 0), (0, 16)])
def test_a_coarse_size_must_be_a_multiple(sizes: tuple[int, int]) -> None:
    message = f"expected a multiple of hash_block_size {sizes[0]}, got {sizes[1]}"
    with pytest.raises(ValueError, match=message):
        BlockHashListWithBlockSize(HASHES, *sizes)


def test_a_coarse_view_refuses_unknown_modes() -> None:
    with pytest.raises(ValueError, match="expected mode concat or last, got 'first'"):
        BlockHashListWithBlockSize(HASHES, 1, 2, "first")

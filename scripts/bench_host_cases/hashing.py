"""Cases of the block hasher: 32,768 tokens in blocks of 16.

The baseline encodes and hashes block by block: `cbor2.dumps` or `pickle.dumps`, then hashlib or xxhash.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable

import cbor2
import numpy as np
import xxhash

from bench_host_cases.case import BenchCase, sample_us
from kvjax.core.hashing.block_hash import ALGORITHMS, BlockHasher

NUM_TOKENS = 32_768
VOCABULARY = 150_000
BLOCK_SIZE = 16
SEED = "bench"
REPETITIONS = 40
BASELINE_REPETITIONS = 10


def make_tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCABULARY, NUM_TOKENS).astype(np.int32)


def plain_hash(algorithm: str) -> Callable[[object], bytes]:
    """Hash of one value: encoding and digest."""
    pickled, cbor = (lambda value: pickle.dumps(value, pickle.HIGHEST_PROTOCOL)), cbor2.dumps
    encode = (lambda value: cbor(value, canonical=True)) if algorithm.endswith("_cbor") else pickled
    if algorithm.startswith("sha256"):
        return lambda value: hashlib.sha256(encode(value)).digest()
    return lambda value: xxhash.xxh3_128_digest(encode(value))


def plain_hashes(algorithm: str, tokens: list[int]) -> list[bytes]:
    """Chained hashes, one block at a time."""
    hash_value = plain_hash(algorithm)
    parent = hash_value(SEED)
    hashes = []
    for start in range(0, len(tokens), BLOCK_SIZE):
        parent = hash_value((parent, tuple(tokens[start : start + BLOCK_SIZE]), None))
        hashes.append(parent)
    return hashes


def hash_case(algorithm: str) -> BenchCase:
    tokens = make_tokens()
    listed = tokens.tolist()
    hasher = BlockHasher(BLOCK_SIZE, algorithm, seed=SEED)
    if hasher.hash_tokens(tokens) != plain_hashes(algorithm, listed):
        raise AssertionError(f"{algorithm}: the hashes differ from the baseline's")
    return BenchCase(
        name=f"hash/{algorithm}/32k",
        run=lambda: sample_us(lambda: hasher.hash_tokens(tokens), REPETITIONS),
        baseline=lambda: sample_us(lambda: plain_hashes(algorithm, listed), BASELINE_REPETITIONS),
    )


def cases() -> list[BenchCase]:
    return [hash_case(algorithm) for algorithm in ALGORITHMS]

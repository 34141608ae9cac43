"""Hashes that are kept are those that a hasher gives."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.adapters.sglang_jax.hash_chains import HashChains, extra_keys_of
from kvjax.core import BlockHash, BlockHasher


def by_definition(tokens: list[int], namespace: str | None, page_size: int) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    BlockHasher(page_size, "xxhash_cbor").extend(hashes, np.array(tokens, np.int64), extra_keys_of(namespace))
    return hashes


@settings(max_examples=50)
@given(
    page_size=st.sampled_from([1, 3]),
    tokens=st.lists(st.integers(0, 3), max_size=12),
    asks=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.sampled_from([None, "", "a"])), max_size=6),
    most_bytes=st.sampled_from([0, 300, 1 << 20]),
)
def test_kept_hashes_are_the_hasher_s(
    page_size: int, tokens: list[int], asks: list[tuple[int, int, str | None]], most_bytes: int
) -> None:
    chains = HashChains(BlockHasher(page_size, "xxhash_cbor"), most_bytes)
    for first, second, namespace in asks:
        asked, longer = tokens[:first], tokens[:second]
        found = chains.of(asked, namespace)
        assert found == by_definition(asked, namespace, page_size)
        held = by_definition(longer, namespace, page_size)[: len(found) // 2]
        assert chains.extend(held, longer, namespace, asked) == by_definition(longer, namespace, page_size)
        assert found == by_definition(asked, namespace, page_size)
        assert chains._num_bytes <= most_bytes


def test_namespaces_differ_the_empty_one_too() -> None:
    chains = HashChains(BlockHasher(2, "xxhash_cbor"))
    assert len({tuple(chains.of([1, 2, 3], namespace)) for namespace in (None, "", "a")}) == 3

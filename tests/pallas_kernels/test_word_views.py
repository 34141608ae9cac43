"""The data path of compiled TPU kernels, bitcasts and strided views of words, against a numpy model of both."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention import tpu_rows
from pallas_kernels.ragged_paged_attention.tpu_pages import KVBlocks
from pallas_kernels.tpu import mosaic
from tests.pallas_kernels.cases import random_values
from tests.pallas_kernels.word_views import WordRef, compile_path, from_words, namespace, packing_of, to_words

DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")


def numbers(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return random_values(np.random.default_rng(seed), shape, dtype)


def same(got: Any, expected: np.ndarray) -> None:
    got = np.asarray(got)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got.view(np.uint8), np.ascontiguousarray(expected).view(np.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_model_is_what_a_word_is(dtype: str) -> None:
    """Numbers of a word lie in its bytes in order, the first lowest; words and numbers are each other's inverse."""
    x = numbers(0, (3, 8, 128), dtype)
    words = to_words(x)
    pack = packing_of(x.dtype)
    bytes_of = words[1, 0, 5:6].view(np.uint8)
    assert bytes_of.tobytes() == b"".join(x[1, p, 5].tobytes() for p in range(pack))
    same(from_words(words, x.dtype), x)


@pytest.mark.skipif(not hasattr(pltpu, "bitcast"), reason="jax has no pltpu.bitcast")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_words(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of entries from any on, as numbers in order; and all rows stored where they came from."""
    x = numbers(1, (2, 3, 6, 5, packing_of(jnp.dtype(dtype)), 128), dtype)
    compile_path(monkeypatch)
    for first, count, row in ((0, 6, 0), (2, 3, 4)):
        words = mosaic.load_row(WordRef.of(x), (1, 2), first, count, row)
        same(mosaic.elements(words, x.dtype), x[1, 2, first : first + count, row].reshape(-1, 128))
        same(mosaic.joined(mosaic.elements(words, x.dtype)), np.asarray(words))
    target = WordRef.of(np.zeros_like(x[0, 0]))
    for row in range(5):
        mosaic.store_row(target, row, mosaic.load_row(WordRef.of(x), (1, 2), 0, 6, row))
    same(target.values, x[1, 2])


@pytest.mark.parametrize(
    ("dtype", "pushed"),
    [(dtype, "float32" if dtype == "float32" else "bfloat16") for dtype in DTYPES]
    + [(dtype, dtype) for dtype in ("float8_e4m3fn", "float8_e5m2")],
)
@pytest.mark.parametrize("pieces", [1, 2])
def test_keys_and_values_of_a_head(dtype: str, pushed: str, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any head of a token: the numbers of its row and place, whatever else its words hold; 0 where not kept."""
    heads, pack = 8, packing_of(jnp.dtype(dtype))
    rows = 2 * heads // pack
    x = numbers(3, (2, 32, pieces * rows | 1, pack, 128), dtype)
    compile_path(monkeypatch)
    kv = KVBlocks(namespace(num_pieces=pieces, pushed_dtype=pushed, tokens_per_row=1), None, None, WordRef.of(x), None)  # type: ignore[arg-type]
    kept = np.broadcast_to(np.arange(16)[:, None] % 3 != 0, (16, pieces * 128))
    for base, offset, value in ((0, 0, 0), (0, 3, 1), (4, 1, 0), (4, 3, 1)):
        word, place = divmod(2 * (base + offset) + value, pack)
        expected = x[1, 8:24, word * pieces : (word + 1) * pieces, place].reshape(16, -1)
        expected = expected.astype(jnp.dtype(pushed))
        same(kv.load(jnp.int32(1), (base, offset), value, 8, 16), expected)
        masked = kv.load(jnp.int32(1), (base, offset), value, 8, 16, jnp.asarray(kept))
        same(masked, np.where(kept, expected, np.zeros((), expected.dtype)))


@pytest.mark.parametrize(
    ("dtype", "pushed"),
    [
        ("int8", "bfloat16"),
        ("float8_e4m3fn", "bfloat16"),
        ("float8_e4m3fn", "float8_e4m3fn"),
        ("float8_e5m2", "float8_e5m2"),
    ],
)
@pytest.mark.parametrize("pieces", [1, 2])
def test_keys_and_values_of_tokens_that_share_words(
    dtype: str, pushed: str, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K and V of one head in the order of the tokens; 0 where not kept, NaN in the other half of a word or not."""
    tokens = numbers(4, (2, 32, pieces, 4, 128), dtype)  # K and V of two tokens in each word
    x = np.pad(tokens, [(0, 0), (0, 0), (0, 1 - pieces % 2), (0, 0), (0, 0)])
    compile_path(monkeypatch)
    sizes = namespace(num_pieces=pieces, pushed_dtype=pushed, tokens_per_row=2)
    kv = KVBlocks(sizes, None, None, WordRef.of(x), None)  # type: ignore[arg-type]
    kept = np.arange(32) % 3 != 0
    bits = np.where(kept[0::2], 0xFFFF, 0) | np.where(kept[1::2], 0xFFFF0000, 0)
    bits = jnp.asarray(np.broadcast_to(bits.astype(np.uint32)[:, None], (16, 128)))
    for value in (0, 1):
        expected = tokens[1, 8:24, :, value::2].swapaxes(1, 2).reshape(32, -1).astype(jnp.dtype(pushed))
        same(kv.load(jnp.int32(1), (0, 0), value, 16, 32), expected)
        masked = kv.load(jnp.int32(1), (0, 0), value, 16, 32, bits)
        same(masked, np.where(kept[:, None], expected, np.zeros((), expected.dtype)))


@pytest.mark.parametrize(("dtype", "group", "heads", "pieces"), [("bfloat16", 4, 2, 1), ("float32", 3, 2, 2)])
def test_tiles_of_queries(dtype: str, group: int, heads: int, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile becomes rows of each KV head, by word, token and place; results go back to where queries came from."""
    pack, queries = packing_of(jnp.dtype(dtype)), 8
    padded = -(-group // pack) * pack
    config = namespace(
        packing=pack, queries=queries, padded_group=padded, num_kv_heads=heads, num_pieces=pieces, num_products=heads
    )
    tile = numbers(4, (queries, pieces * heads * padded // pack, pack, 128), dtype)
    compile_path(monkeypatch)
    rows = np.zeros((heads, queries * padded, pieces * 128), tile.dtype)
    for head in range(heads):
        tpu_rows.unpack_head(WordRef.of(tile), head, _Rows(rows[head]), config)
    back = WordRef.of(np.zeros_like(tile))
    for head in range(heads):
        tpu_rows.pack_head(jnp.asarray(rows[head]), head, back, config)
    same(back.values, tile)
    for head in range(heads):
        for token, query in ((0, 0), (3, padded - 1), (7, 1)):
            row = (query // pack * queries + token) * pack + query % pack
            for piece in range(pieces):
                word = (piece * heads + head) * padded // pack + query // pack
                same(rows[head, row, piece * 128 : (piece + 1) * 128], tile[token, word, query % pack])


@pytest.mark.parametrize(("pack", "group", "heads"), [(2, 4, 2), (1, 3, 2), (2, 16, 10)])
def test_lse_of_tiles(pack: int, group: int, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each query head's number goes to its lane, in rows of 128 heads."""
    queries = 8
    config = namespace(packing=pack, queries=queries, padded_group=group, num_kv_heads=heads, num_products=heads)
    lse = np.random.default_rng(5).standard_normal((queries, heads * group)).astype(np.float32)
    m = np.zeros((heads, queries * group, 128), np.float32)
    for head, query in np.ndindex(heads, group):
        row = (query // pack * queries + np.arange(queries)) * pack + query % pack
        m[head, row] = lse[:, head * group + query, None]
    compile_path(monkeypatch)
    staged = np.zeros((queries, -(-heads * group // 128), 128), np.float32)
    tpu_rows.pack_lse(WordRef.of(m), _Rows(staged), config)
    np.testing.assert_array_equal(staged.reshape(queries, -1)[:, : heads * group], lse)


class _Rows:
    """A reference of which nobody takes another view."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.shape, self.dtype = values, values.shape, values.dtype

    def __setitem__(self, index: Any, value: jax.Array) -> None:
        index = tuple(slice(i.start, i.start + i.size) if hasattr(i, "size") else i for i in index)
        self.values[index] = np.asarray(value)

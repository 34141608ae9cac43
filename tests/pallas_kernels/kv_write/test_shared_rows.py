"""KV writes where two tokens of one 8-bit head share rows of words: half of a word is new, the other stays."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.interpret.on_tpu import compile_on_tpu
from pallas_kernels.kv_write import kv_write, oracle
from pallas_kernels.layouts import attention_layout
from pallas_kernels.tpu import word_rows
from tests.pallas_kernels.cases import random_values

PAGES = 5

TOKENS = 16
SLOTS: dict[int, tuple[tuple[int, ...], ...]] = {  # by page size
    16: (
        (29,),
        (28,),
        tuple(range(27, 36)),
        (30, -1, 19, 33, 18, 3, 47, 31),
        tuple(range(32, 48)),
        (-1, 2, -1),
    ),
    8: ((13,), tuple(range(11, 19))),
    128: ((129, 130, 255, 384, -1, 385, 386, 511),),
}


QUICK = {("int8", "reference", 8), ("float8_e4m3fn", "tpu", 16), ("int8", "tpu", 8)}


@pytest.mark.parametrize(
    ("dtype", "backend", "page_size"),
    [
        pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.sweep])
        for case in itertools.product(("int8", "float8_e4m3fn", "float8_e5m2"), ("reference", "tpu"), SLOTS)
    ],
)
def test_the_other_token_of_a_word_keeps_its_bits(
    dtype: str, backend: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit a loop over tokens, over several chunks of rows, NaN or any number in what is not written.

    For the reference any NaN of float8 is another.
    """
    monkeypatch.setattr(word_rows, "CHUNK_ROWS", 8)
    jax.clear_caches()
    dim = 192 if page_size == 8 else 80
    (array,) = attention_layout(num_kv_heads=1, head_dim=dim, page_size=page_size, dtype=dtype, platform="tpu").arrays

    def write(*given: Any) -> Any:
        return kv_write(*given, k_scale=jnp.float32(2), v_scale=jnp.full(1, 2.0), backend=backend)

    run = None
    for number, some in enumerate(SLOTS[page_size]):
        rng = np.random.default_rng(number)
        pages = random_values(rng, array.shape(PAGES), dtype)
        pages[1 : number + 2] = np.asarray(jnp.array(127 if dtype == "int8" else np.nan, pages.dtype))
        k, v = (random_values(rng, (TOKENS, 1, dim), dtype) for _ in range(2))
        slots = np.array(some + (-1,) * (TOKENS - len(some)), np.int32)
        arguments = (*(jnp.asarray(2 * x.astype(np.float32)) for x in (k, v)), (jnp.asarray(pages),), jnp.array(slots))
        run = run or (compile_on_tpu(write, *arguments) if backend == "tpu" else jax.jit(write))
        (got,) = run(*arguments)
        new = tuple(2 * x.astype(np.float32) for x in (k, v))
        (want,) = oracle.kv_write(new, (pages,), slots, page_size, (np.float32(2), np.float32(2)))
        bits, wanted = (np.asarray(x).view(np.uint8) for x in (got, want))
        if backend == "reference" and dtype != "int8":  # XLA for CPU converts float8 pages there and back
            bits = np.where(np.isnan(np.asarray(got)) & np.isnan(want), wanted, bits)
        np.testing.assert_array_equal(bits, wanted)
    jax.clear_caches()


def test_slots_beyond_the_pages_are_refused() -> None:
    """A page has twice as many slots as rows of words."""
    pages, new = (jnp.zeros((3, 4, 1, 4, 128), jnp.int8),), jnp.zeros((1, 1, 8))
    kv_write(new, new, pages, jnp.array([23], jnp.int32))
    with pytest.raises(ValueError, match=r"expected slots in \[-1, 24\), got 24"):
        kv_write(new, new, pages, jnp.array([24], jnp.int32))

"""The TPU kernel of kv_write: its runs of slots, a wait that is removed, what it cannot do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.interpret.on_tpu import compile_on_tpu, tpu_device
from pallas_kernels.kv_write import kernel_tpu, kv_write
from pallas_kernels.layouts import attention_layout
from pallas_kernels.tpu.dma_runs import copy_runs


def test_runs_end_at_pages() -> None:
    """Runs: successive slots of one page; skipped tokens cut them."""
    slots = jnp.array([20, 21, 15, -1, 22, 30, 31, 32, 33, 5], jnp.int32)
    assert np.asarray(kernel_tpu.write_runs(slots, 16)).reshape(-1)[-1] == 4
    table = np.asarray(kernel_tpu.write_runs(slots, 16))[:-1].reshape(3, 10)[:, :4]
    assert table.tolist() == [[0, 4, 5, 7], [20, 22, 30, 32], [2, 1, 2, 2]]


def test_runs_follow_both_sides() -> None:
    """A run goes on while source and target go up together."""
    source, target = jnp.array([3, 4, 5, 9]), jnp.array([7, 8, 2, 3])
    table = np.asarray(copy_runs(jnp.ones(4, bool), source, target))
    assert table[-1] == 3
    assert table[:-1].reshape(3, 4)[:, :3].tolist() == [[3, 5, 9], [7, 2, 3], [2, 1, 1]]


@pytest.mark.skipif(tpu_device() is not None, reason="the interpreter alone leaves undone what nobody waits for")
def test_a_removed_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that nobody waits for have not arrived when the kernel ends."""

    def start_all(table, make_copy, meanwhile):  # type: ignore[no-untyped-def]
        size = (table.shape[0] - 1) // 3
        for i in range(2):
            make_copy(table[i], table[size + i], table[2 * size + i]).start()

    layout = attention_layout(num_kv_heads=2, head_dim=128, page_size=16, dtype="float32", platform="tpu")
    arguments = (*jnp.ones((2, 4, 2, 128)), (jnp.zeros(layout.arrays[0].shape(4)),), jnp.array([16, 17, 32, 33]))
    for is_planted in (False, True):
        if is_planted:
            monkeypatch.setattr(kernel_tpu, "copy_all", start_all)
        jax.clear_caches()
        (pages,) = compile_on_tpu(lambda *arrays: kv_write(*arrays, backend="tpu"), *arguments)(*arguments)
        assert pages.any() != is_planted
    jax.clear_caches()


BAD = {
    "split": ("float32", "cpu", 5, "TPU kernels write packed pages"),
    "float16": ("float16", "tpu", 5, "TPU has no arithmetic on float16 pages"),
    "tokens": ("float32", "tpu", 32769, "writes up to 32768 tokens a call, got 32769"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_the_kernel_cannot_do(name: str) -> None:
    dtype, platform, tokens, message = BAD[name]
    layout = attention_layout(num_kv_heads=1, head_dim=8, page_size=16, dtype=dtype, platform=platform)
    pages = tuple(jnp.zeros(array.shape(3), array.dtype) for array in layout.arrays)
    new = jnp.zeros((tokens, 1, 8))
    with pytest.raises(NotImplementedError, match=f"kv_write: .*{message}"):
        jax.eval_shape(
            lambda *a: kv_write(*a, backend="tpu"), new, new, pages, jax.ShapeDtypeStruct((tokens,), jnp.int32)
        )

"""The TPU kernel of latent_write: states that share words, races, what it cannot do."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.interpret.on_tpu import RaceError, compile_on_tpu, tpu_device
from pallas_kernels.latent_write import latent_write
from pallas_kernels.layouts import latent_layout
from pallas_kernels.tpu import word_rows


def test_states_of_one_row_go_together() -> None:
    """Slots 8 and 9 lie in one row of words though they come apart; a run ends with its page."""
    slots = jnp.array([9, 12, -1, 10, 13, 8, 14, 3], jnp.int32)
    plan = word_rows.plan_rows(slots, page_size=4, rows_per_page=2, places=2, chunk=8)
    assert plan.num_rows == 4
    assert plan.entries[:5].tolist() == [[5, 0], [3, -1], [1, 4], [6, -1], [-1, -1]]
    table = np.asarray(plan.runs)
    assert table[-1] == 2
    assert table[:-1].reshape(3, 8)[:, :2].tolist() == [[0, 2], [4, 6], [2, 2]]


@pytest.mark.skipif(tpu_device() is not None, reason="races are seen by the interpreter only")
def test_a_planted_race_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old rows that still arrive while they are merged with new ones."""
    copy_all = word_rows.copy_all

    def still_reading(table: Any, make_copy: Any, *, first: Any, size: int) -> None:
        copy_all(table, make_copy, first=first, size=size)
        again = make_copy(*(table[first + i * size] for i in range(3)))
        again.wait() if make_copy.__name__ == "write" else again.start()

    monkeypatch.setattr(word_rows, "copy_all", still_reading)
    jax.clear_caches()
    arguments = (jnp.ones((8, 24), jnp.bfloat16), (jnp.zeros((3, 2, 1, 2, 128), jnp.bfloat16),))
    slots = jnp.array([-1, 5, *[-1] * 6], jnp.int32)
    run = compile_on_tpu(functools.partial(latent_write, backend="tpu"), *arguments, slots)
    with pytest.raises(RaceError, match=r"race|RACE"):
        run(*arguments, slots)
    jax.clear_caches()


BAD = {
    "split": ("float32", "cpu", 5, "TPU kernels write packed latent pages"),
    "float16": ("float16", "tpu", 5, "TPU has no arithmetic on float16 pages"),
    "states": ("float32", "tpu", 32769, "writes up to 32768 states a call, got 32769"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_the_kernel_cannot_do(name: str) -> None:
    dtype, platform, states, message = BAD[name]
    (array,) = latent_layout(head_dim=24, page_size=16, dtype=dtype, platform=platform).arrays
    pages = (jnp.zeros(array.shape(3), array.dtype),)
    with pytest.raises(NotImplementedError, match=f"latent_write: .*{message}"):
        jax.eval_shape(
            lambda *a: latent_write(*a, backend="tpu"),
            jnp.zeros((states, 24)),
            pages,
            jax.ShapeDtypeStruct((states,), jnp.int32),
        )

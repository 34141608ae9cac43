"""The TPU kernel of the compressor: a race that is found, and what it cannot do."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compressor_update import compressor_update, kernel_tpu
from pallas_kernels.compressor_update.cases import CompressorCase
from pallas_kernels.interpret.on_tpu import RaceError, compile_on_tpu, tpu_device
from pallas_kernels.layouts import latent_layout

DIM = 128
CASE = CompressorCase(tokens=24, seqs=3, context=20, ratio=4, dim=DIM, page=4, q_dtype="float32")


@pytest.mark.skipif(tpu_device() is not None, reason="races are seen by the interpreter only")
def test_a_planted_race_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """States loaded into the buffer in use: a race is reported."""
    target = kernel_tpu._Step._target
    monkeypatch.setattr(kernel_tpu._Step, "_target", lambda self, i, slot: target(self, i, 1 - slot))
    jax.clear_caches()
    arguments = CASE.step(np.random.default_rng(0), [(8, 8), (8, 8)])
    run = compile_on_tpu(partial(CASE.call, "tpu"), *arguments)
    with pytest.raises(RaceError, match=r"race|RACE"):
        run(*arguments)
    jax.clear_caches()


GOOD: dict[str, Any] = {"tokens": 8, "ratio": 4, "width": 2 * DIM, "page_size": 4, "platform": "tpu"}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "layout": ({"platform": "cpu"}, "TPU kernels read packed latent pages"),
    "dim": ({"width": 2 * 72}, "entries of a multiple of 128 numbers, got 72"),
    "tokens": ({"tokens": 32769}, "writes up to 32768 tokens a call, got 32769"),
    "states": ({"ratio": 2048, "width": 1024}, "states of an entry exceed 12 MiB of VMEM: 4096 of 2048"),
    "pieces": ({"tokens": 32768, "ratio": 3, "page_size": 1}, "from up to 65536 pieces of pages a call, got 65550"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_the_kernel_cannot_do(name: str) -> None:
    change, message = BAD[name]
    sizes = GOOD | change
    tokens, width, page_size = sizes["tokens"], sizes["width"], sizes["page_size"]
    layout = latent_layout(head_dim=2 * width, page_size=page_size, dtype="float32", platform=sizes["platform"])
    floats = [jax.ShapeDtypeStruct((n, width), jnp.float32) for n in (tokens, tokens, sizes["ratio"])]
    pages = (jax.ShapeDtypeStruct(layout.arrays[0].shape(3), jnp.float32),)
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3, 2), (3,), (4,), (3,), (tokens,))]

    def run(kv: Any, scores: Any, bias: Any, pages: Any, *ints: Any) -> Any:
        return compressor_update(kv, scores, pages, *ints, position_bias=bias, overlap=True, backend="tpu")

    with pytest.raises(NotImplementedError, match=f"compressor_update: .*{message}"):
        jax.eval_shape(run, *floats, pages, *ints)

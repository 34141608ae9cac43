"""The TPU kernel of the compressor, in steps of any cut against the whole sequence; NaN in pages, races watched."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.compressor_update import compressor_update, kernel_tpu
from pallas_kernels.interpret.on_tpu import RaceError, compile_on_tpu, tpu_device
from pallas_kernels.layouts import latent_layout
from tests.pallas_kernels.compressor_update.test_compressor_update import Steps

DIM = 128


def tpu_op(overlap: bool, page_size: int) -> Callable[..., Any]:
    """The op on TPU, compiled at its first call."""
    compiled: list[Callable[..., Any]] = []

    def run(*arguments: Any, position_bias: Any) -> Any:
        arguments = jax.tree.map(jnp.asarray, (*arguments, position_bias))
        if not compiled:
            call = functools.partial(compressor_update, overlap=overlap, page_size=page_size, backend="tpu")
            compiled.append(compile_on_tpu(lambda *a: call(*a[:-1], position_bias=a[-1]), *arguments))
        return compiled[0](*arguments)

    return run


@pytest.mark.parametrize(
    ("ratio", "overlap", "page_size", "dim"),
    [
        (4, True, 4, DIM),  # DeepSeek V4's indexer
        (8, False, 4, DIM),  # as layers of ratio 128, smaller
        pytest.param(4, True, 4, 512, marks=pytest.mark.sweep),
        pytest.param(16, False, 8, 512, marks=pytest.mark.sweep),
        pytest.param(1, True, 3, DIM, marks=pytest.mark.sweep),
        pytest.param(3, False, 1, DIM, marks=pytest.mark.sweep),
        pytest.param(5, True, 16, DIM, marks=pytest.mark.sweep),
        pytest.param(6, True, 4, DIM, marks=pytest.mark.sweep),
    ],
)
def test_entries_are_those_of_the_whole_sequence(ratio: int, overlap: bool, page_size: int, dim: int) -> None:
    """Whole prompts, chunks, one token at a time, rows without tokens."""
    op = tpu_op(overlap, page_size)
    for seed in range(2):
        steps = Steps(seed, ratio, overlap, page_size, "tpu", dim, max_len=20, op=op)
        steps.step([7, 1, 0])
        steps.run([1, 8, 12])


@pytest.mark.skipif(tpu_device() is not None, reason="races are seen by the interpreter only")
def test_a_planted_race_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """States loaded into the buffer in use: a race is reported."""
    target = kernel_tpu._Step._target
    monkeypatch.setattr(kernel_tpu._Step, "_target", lambda self, i, slot: target(self, i, 1 - slot))
    jax.clear_caches()
    steps = Steps(0, 4, True, 4, "tpu", DIM, max_len=20, op=tpu_op(True, 4))
    with pytest.raises(RaceError, match=r"race|RACE"):
        steps.step([8, 8, 0])
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

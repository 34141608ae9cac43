"""Kernels run on the accelerator where there is one: arguments go there, results come back."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.interpret import on_gpu, on_tpu


@pytest.mark.parametrize(
    ("module", "find", "compile_on"),
    [(on_tpu, "tpu_device", on_tpu.compile_on_tpu), (on_gpu, "gpu_device", on_gpu.compile_on_gpu)],
    ids=["tpu", "gpu"],
)
def test_an_accelerator_runs_what_would_be_interpreted(
    module: ModuleType, find: str, compile_on: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that stands for it, a function is compiled for it and traced with it as the default."""
    (device,) = jax.devices("cpu")[:1]
    seen = []

    def double(x: jax.Array, pages: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        seen.append(jax.config.jax_default_device)
        return 2 * x, pages

    monkeypatch.setattr(module, find, lambda: device)
    x = jnp.arange(3)
    twice, pages = compile_on(double, x, (x,))(x, (x,))
    assert isinstance(twice, np.ndarray)
    assert twice.tolist() == [0, 2, 4]
    assert isinstance(pages[0], np.ndarray)
    assert seen == [device]


def test_a_function_without_a_kernel_has_no_races() -> None:
    x = jnp.arange(3)
    assert on_tpu.compile_on_tpu(lambda x: x + 1, x)(x).tolist() == [1, 2, 3]

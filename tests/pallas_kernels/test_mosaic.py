"""Parameters that every TPU kernel is compiled with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu import mosaic


def test_a_kernel_leaves_room_in_vmem(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel asks for all of a core: at most 56 of v7x's 64 MiB; where less is asked for, that stays."""
    monkeypatch.setattr(pltpu, "get_tpu_info", lambda: SimpleNamespace(vmem_capacity_bytes=64 << 20))
    assert mosaic.compiler_params(64 << 20).vmem_limit_bytes == 56 << 20
    assert mosaic.compiler_params(32 << 20).vmem_limit_bytes == 32 << 20


@pytest.mark.parametrize(("value", "is_off"), [(None, True), ("0", True), ("1", False)])
def test_bounds_checks_can_be_switched_on(value: str | None, is_off: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a variable of the environment, read where a kernel is traced."""
    monkeypatch.delenv(mosaic.BOUNDS_CHECKS, raising=False)
    if value is not None:
        monkeypatch.setenv(mosaic.BOUNDS_CHECKS, value)
    assert mosaic.compiler_params(1 << 20).disable_bounds_checks is is_off

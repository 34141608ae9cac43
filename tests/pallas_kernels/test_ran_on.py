"""A kernel that never ran on a kind of chip is told of once; one that did is not."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from pallas_kernels import ran_on
from pallas_kernels.backends import by_xla, resolve_backend


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """jax's device is a GPU on which kv_write ran."""
    path = tmp_path / "ran_on.json"
    path.write_text(json.dumps({"NVIDIA X1": {"gpu": ["kv_write"]}}))
    monkeypatch.setattr(ran_on, "RECORD", path)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="gpu", device_kind="NVIDIA X1")])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    ran_on._tell_untried.cache_clear()
    caplog.set_level(logging.WARNING, "pallas_kernels")


@pytest.mark.parametrize("op", ["kv_write", "latent_write"])
def test_auto_tells_once_of_a_kernel_that_never_ran_here(op: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert resolve_backend(op, "auto", {"gpu": None}) == "gpu"
    told = ["latent_write: the gpu kernel was never run on a NVIDIA X1; `kvjax check` compares it with its reference"]
    assert caplog.messages == (told if op == "latent_write" else [])


def test_no_kernel_is_told_of_where_xla_compiles_the_op(caplog: pytest.LogCaptureFixture) -> None:
    assert resolve_backend("merge_states", "auto", {"gpu": by_xla}) == "gpu"
    assert not caplog.messages


def test_a_cpu_runs_no_kernel(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="cpu", device_kind="cpu")])
    ran_on.tell_untried("latent_write", "gpu")
    assert not caplog.messages

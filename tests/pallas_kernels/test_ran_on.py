"""A kernel that never ran on a kind of chip is told of once; one that did is not."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import ran_on
from pallas_kernels.backends import by_xla, resolve_backend
from pallas_kernels.slab_pages import SlabColumn, name_in_slabs


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
    told = ["latent_write: the gpu kernel was never run on a NVIDIA X1; `kvjax check` compares kernels with references"]
    assert caplog.messages == (told if op == "latent_write" else [])


def test_an_op_over_pages_in_slabs_has_not_run_because_the_op_has(caplog: pytest.LogCaptureFixture) -> None:
    column = SlabColumn(jnp.zeros((1, 1, 128), jnp.uint32), ())
    resolve_backend(name_in_slabs("kv_write", column), "auto", {"gpu": None})
    assert [message.partition(";")[0] for message in caplog.messages] == [
        "kv_write in slabs: the gpu kernel was never run on a NVIDIA X1"
    ]


def test_no_kernel_is_told_of_where_xla_compiles_the_op(caplog: pytest.LogCaptureFixture) -> None:
    assert resolve_backend("merge_states", "auto", {"gpu": by_xla}) == "gpu"
    assert not caplog.messages


def test_a_cpu_runs_no_kernel(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="cpu", device_kind="cpu")])
    ran_on.tell_untried("latent_write", "gpu")
    assert not caplog.messages

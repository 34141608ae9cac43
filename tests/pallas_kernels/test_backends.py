"""Choice of the implementation."""

from __future__ import annotations

import warnings

import jax
import pytest

from pallas_kernels.backends import XlaPath, resolve_backend


def test_auto_is_silent_on_cpu() -> None:
    assert resolve_backend("op", "auto") == "reference"
    assert resolve_backend("op", "reference") == "reference"


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_auto_falls_back_with_one_warning_elsewhere(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning per op and reason; asking for the reference says nothing."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    op = f"op_of_{platform}"
    with pytest.warns(RuntimeWarning, match=f"{op}: there is no {platform} kernel; the reference runs instead"):
        assert resolve_backend(op, "auto") == "reference"
    with pytest.warns(RuntimeWarning, match=f"{op}: it rains; the reference runs instead"):
        assert resolve_backend(op, "auto", {platform: "it rains"}) == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_backend(op, "auto") == "reference"
        assert resolve_backend(f"other_{op}", "reference") == "reference"
        assert resolve_backend(op, "auto", {platform: None}) == platform


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_platform_by_name(platform: str) -> None:
    """Taken on any machine, if its kernel can do the call."""
    assert resolve_backend("op", platform, {platform: None}) == platform
    with pytest.raises(NotImplementedError, match="op: it rains; use backend='auto' or 'reference'"):
        resolve_backend("op", platform, {platform: "it rains"})
    with pytest.raises(NotImplementedError, match=f"op: there is no {platform} kernel"):
        resolve_backend("op", platform)


PATH = XlaPath(4, 500_000_000, "the KV that its tables name")


def test_xla_by_name() -> None:
    """Taken on any machine; an op that has no such path runs its reference, which is plain XLA as well."""
    assert resolve_backend("op", "xla", {"gpu": None}, PATH) == "xla"
    assert resolve_backend("op", "xla", {"gpu": None}) == "reference"
    assert resolve_backend("op", "auto", {"gpu": "it rains"}, PATH) == "reference"  # on CPU


def test_a_gpu_without_a_kernel_runs_xla_and_says_once_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning per op and cause, whatever the shapes; it names the path and its expected cost."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    said = (
        r"op_of_xla: it rains; vectorised XLA runs instead, with about 4 passes over the KV that its tables name, at "
        r"most 0.5 GB: 2 ms a call at 1 TB/s of memory bandwidth \(backend='xla' silences this\)"
    )
    with pytest.warns(RuntimeWarning, match=said):
        assert resolve_backend("op_of_xla", "auto", {"gpu": "it rains"}, PATH) == "xla"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_backend("op_of_xla", "auto", {"gpu": "it rains"}, PATH._replace(num_bytes=1)) == "xla"
        assert resolve_backend("op_of_xla", "auto", {"gpu": None}, PATH) == "gpu"
        assert resolve_backend("op_of_xla", "xla", {"gpu": "it rains"}, PATH) == "xla"


def test_a_gpu_takes_triton_before_xla_where_the_op_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one warning of its cost; a call that it cannot do goes to XLA."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    said = (
        r"op_of_triton: it rains; a kernel in Triton runs instead, with about 2 passes over the KV that its tables "
        r"name, at most 0.5 GB: 1 ms a call at 1 TB/s of memory bandwidth \(backend='triton' silences this\)"
    )
    with pytest.warns(RuntimeWarning, match=said):
        assert resolve_backend("op_of_triton", "auto", {"gpu": "it rains", "triton": None}, PATH) == "triton"
    with pytest.warns(RuntimeWarning, match="op_of_both: it rains; vectorised XLA runs instead"):
        assert resolve_backend("op_of_both", "auto", {"gpu": "it rains", "triton": "it snows"}, PATH) == "xla"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_backend("op_of_triton", "triton", {"gpu": "it rains", "triton": None}, PATH) == "triton"
        assert resolve_backend("op_of_triton", "auto", {"gpu": None, "triton": None}, PATH) == "gpu"
        assert resolve_backend("op", "triton", {"gpu": "it rains"}, PATH) == "xla"
        assert resolve_backend("op", "triton", {"gpu": "it rains"}) == "reference"
    with pytest.raises(NotImplementedError, match="op: it snows; use backend='auto' or 'reference'"):
        resolve_backend("op", "triton", {"triton": "it snows"}, PATH)


def test_a_tpu_runs_its_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path is for GPUs: elsewhere calls that kernels cannot take run the reference."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.warns(RuntimeWarning, match="op_of_tpu_path: it rains; the reference runs instead"):
        assert resolve_backend("op_of_tpu_path", "auto", {"tpu": "it rains"}, PATH) == "reference"

"""Choice of the implementation."""

from __future__ import annotations

import warnings

import jax
import pytest

from pallas_kernels.backends import resolve_backend


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

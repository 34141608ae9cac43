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
    """One warning per op and platform; asking for the reference says nothing."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    op = f"op_of_{platform}"
    with pytest.warns(RuntimeWarning, match=f"{op}: there is no kernel for {platform}; the reference runs instead"):
        assert resolve_backend(op, "auto") == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_backend(op, "auto") == "reference"
        assert resolve_backend(f"other_{op}", "reference") == "reference"

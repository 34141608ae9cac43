"""Releases of the TPU compiler: which word names which, and folders that pip fills once."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from scripts.lab.tpu import libtpu
from scripts.lab.tpu.compiler import environment
from scripts.lab.tpu.libtpu import LibtpuError, Release, named, pinned_pattern, release

KNOWN = ["0.0.52", "0.0.51", "0.0.50.1", "0.0.50", "0.0.49"]
JAX = ["jaxlib==0.12.0", 'libtpu==0.0.50.*; extra == "tpu"', 'requests; extra == "tpu"']


@pytest.mark.parametrize(
    ("word", "expected"),
    [("newest", "0.0.52"), ("previous", "0.0.51"), ("pinned", "0.0.50.1"), ("0.0.44.1", "0.0.44.1")],
)
def test_names_of_releases(word: str, expected: str) -> None:
    """jax's pin is the newest release that it allows, 0.0.50 itself among them."""
    assert named(word, lambda: KNOWN, JAX) == expected
    assert named("pinned", lambda: KNOWN[3:], JAX) == "0.0.50"


def test_names_that_stand_for_nothing() -> None:
    with pytest.raises(LibtpuError, match=r"expected a version of libtpu or one of installed, .*, got 'best'"):
        named("best", lambda: KNOWN, JAX)
    with pytest.raises(LibtpuError, match=r"expected a release of libtpu that is previous \(\*\), pip finds none"):
        named("previous", lambda: KNOWN[:1], JAX)
    with pytest.raises(LibtpuError, match=r"that is pinned \(0\.0\.50\.\*\), pip finds none"):
        named("pinned", lambda: KNOWN[:2], JAX)
    with pytest.raises(LibtpuError, match="expected jax to pin libtpu in its extra 'tpu', it requires"):
        pinned_pattern(["numpy"])


def test_the_installed_jax_pins_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.\*|\.\d+)?", pinned_pattern(metadata.requires("jax") or []))


def test_what_pip_says(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "libtpu (0.0.52)\nAvailable versions: 0.0.52, 0.0.51\n  INSTALLED: 0.0.51\n"
    monkeypatch.setattr(libtpu, "_pip", lambda *_: said)
    assert libtpu.available() == ["0.0.52", "0.0.51"]
    monkeypatch.setattr(libtpu, "_pip", lambda *_: "nothing")
    with pytest.raises(LibtpuError, match="expected versions of libtpu from pip, got 'nothing'"):
        libtpu.available()


def test_a_pip_that_fails() -> None:
    with pytest.raises(LibtpuError, match=r"pip nothing failed:\n(.|\n)*nothing"):
        libtpu._pip("nothing")


def test_a_release_is_installed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Into a folder of its version; the one beside jax is taken as it is."""
    asked = []

    def pip(*arguments: str) -> str:
        asked.append(arguments[-1])
        Path(arguments[arguments.index("--target") + 1]).mkdir(parents=True)
        return ""

    monkeypatch.setattr(libtpu, "_pip", pip)
    monkeypatch.setattr(libtpu, "installed_version", lambda: "0.0.52")
    monkeypatch.setenv("KVJAX_LIBTPU", str(tmp_path))
    monkeypatch.setattr(libtpu, "available", lambda: KNOWN)
    for _ in range(2):
        found = release("previous")
        assert found == Release("0.0.51", tmp_path / "0.0.51" / "libtpu" / "libtpu.so")
    assert asked == ["libtpu==0.0.51"]
    assert release("newest") == release("installed") == release("0.0.52") == Release("0.0.52")
    assert environment(found)["TPU_LIBRARY_PATH"] == str(found.library)
    assert "TPU_LIBRARY_PATH" not in release("newest").environment
    monkeypatch.setattr(libtpu, "installed_version", lambda: None)
    with pytest.raises(LibtpuError, match=r"expected libtpu beside jax, found none; install kvjax\[tpu-aot\]"):
        release("installed")


def test_an_install_that_fails_leaves_no_release(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def pip(*arguments: str) -> str:
        raise LibtpuError("no network")

    monkeypatch.setattr(libtpu, "_pip", pip)
    monkeypatch.setattr(libtpu, "installed_version", lambda: None)
    monkeypatch.setenv("KVJAX_LIBTPU", str(tmp_path))
    with pytest.raises(LibtpuError, match="no network"):
        release("0.0.51")
    assert not (tmp_path / "0.0.51").exists()

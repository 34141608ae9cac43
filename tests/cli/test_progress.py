"""A progress bar is for a terminal only, and only where tqdm is."""

from __future__ import annotations

import sys

import pytest

from kvjax.cli.running.progress import progress


def test_nothing_is_drawn_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("Working", 3, "step") as advance:
        advance(2)
        advance(1)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_sees_the_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress("Working", 3, "step") as advance:
        advance(3)
    assert "Working" in capsys.readouterr().err
    with progress("Working", 3, "step", enabled=False) as advance:
        advance(3)
    assert capsys.readouterr().err == ""


def test_without_tqdm_there_is_no_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress("Working", 3, "step") as advance:
        advance(3)
    assert capsys.readouterr().err == ""

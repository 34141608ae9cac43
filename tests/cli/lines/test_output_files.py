"""Files that cannot be written are refused before any work, and none is created by asking."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path

import pytest

from kvjax.cli.running.output_files import has_matplotlib, output_file, require_matplotlib
from kvjax.errors import MissingExtraError


def test_asking_creates_and_changes_nothing(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("kept")
    assert [output_file(str(path)) for path in (old, new)] == [old, new]
    assert old.read_text() == "kept"
    assert not new.exists()


def test_folders_and_files_nowhere_are_refused(tmp_path: Path) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected a file to write, got the folder"):
        output_file(str(tmp_path))
    with pytest.raises(argparse.ArgumentTypeError, match="expected a file in a folder that exists, got"):
        output_file(str(tmp_path / "none" / "x.json"))


def test_files_that_may_be_read_alone_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old file of that kind, and a new one in such a folder."""
    old, folder = tmp_path / "old.json", tmp_path / "folder"
    old.write_text("kept")
    folder.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK or path not in (old, folder))
    for path in (old, folder / "new.json"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a file that may be written, got"):
            output_file(str(path))
    assert output_file(str(tmp_path / "new.json")) == tmp_path / "new.json"


def test_matplotlib_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not has_matplotlib()
    with pytest.raises(MissingExtraError, match=r"--plot needs matplotlib, .*: pip install 'kvjax\[plots\]'"):
        require_matplotlib("--plot")

"""Engines of commands compile one step: what a command prints and writes does not depend on how many they have."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def one_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("generate", "bench"):
        monkeypatch.setattr(f"kvjax.cli.commands.{command}.MAX_BUCKETS", 1)

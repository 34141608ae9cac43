"""The script that calls a manager at random: it passes, says what it did, and finds a planted bug."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from kvjax.core.pool.block_pool import BlockPool
from kvjax.errors import InvariantError

SCRIPTS = str(Path(__file__).parents[3] / "scripts")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return import_module("random_calls")


def test_every_deployment_is_called(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--calls", "900", "--seed", "3"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in script.DEPLOYMENTS)
    assert "seed 3, no invariant broken" in printed


def test_a_planted_bug_is_found(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def free_without_reference(self: BlockPool, ids: np.ndarray) -> None:
        self.eviction_policy.release(ids)

    monkeypatch.setattr(BlockPool, "free_held", free_without_reference)
    with pytest.raises(InvariantError):
        script.main(["--calls", "9000"])
    assert "full, seed 0: InvariantError" in capsys.readouterr().err


def test_no_calls_are_refused(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(["--calls", "0"])
    assert "expected --calls of at least 1, got 0" in capsys.readouterr().err

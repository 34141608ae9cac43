"""vLLM loads the plugin in each process; the environment says whether it does anything."""

from __future__ import annotations

import logging
import os
import sys
from importlib.metadata import entry_points

import pytest

from kvjax.adapters.vllm import KVCacheManager, uninstall
from kvjax.adapters.vllm_plugin import register
from kvjax.errors import MissingStackError
from tests.adapters.vllm.fake_vllm import RELEASES, installed, recorded


def test_vllm_finds_the_plugin_by_its_group() -> None:
    (found,) = entry_points(group="vllm.general_plugins", name="kvjax")
    assert found.load() is register


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_happens_unless_asked_for(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user of the environment may have kvjax installed for something else."""
    monkeypatch.delenv("KVJAX_VLLM", raising=False)
    if value is not None:
        monkeypatch.setenv("KVJAX_VLLM", value)
    with installed(recorded(RELEASES[-1])) as vllm:
        own = vllm.modules["vllm.v1.core.sched.scheduler"].KVCacheManager
        register()
        assert vllm.modules["vllm.v1.core.sched.scheduler"].KVCacheManager is own


@pytest.mark.parametrize("name", RELEASES)
def test_asked_for_it_installs_the_manager_and_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line: which manager, of which release, in which process."""
    monkeypatch.setenv("KVJAX_VLLM", "1")
    with installed(recorded(name)) as vllm, caplog.at_level(logging.INFO, "vllm.kvjax"):
        register()
        assert vllm.modules["vllm.v1.core.sched.scheduler"].KVCacheManager is KVCacheManager
        uninstall()
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"of vllm {recorded(name)['version']} in process {os.getpid()} (policy 'stack')" in line


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVJAX_VLLM", "on")
    with pytest.raises(ValueError, match="KVJAX_VLLM of 0 or 1, got 'on'"):
        register()


def test_asked_for_without_vllm_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own manager in silence would be worse."""
    monkeypatch.setenv("KVJAX_VLLM", "1")
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingStackError, match="needs vllm"):
        register()

"""What differs from a recorded release is refused by its name; nothing is guessed."""

from __future__ import annotations

import inspect
import subprocess
import sys
from copy import deepcopy
from typing import Any

import pytest

from kvjax.adapters.any_release import refuse_unless_allowed
from kvjax.adapters.vllm import KVCacheManager, install, uninstall
from kvjax.adapters.vllm.description import describe_installed
from kvjax.adapters.vllm.release import RULES, check_description, installed_release, nearest_release
from kvjax.errors import MissingStackError, UnknownStackError
from tests.adapters.vllm.fake_vllm import RELEASES, installed, recorded

release = pytest.mark.parametrize("name", RELEASES)


def test_the_adapter_imports_without_vllm_and_fails_on_use_with_one_line() -> None:
    """The line names the package and the versions that do."""
    code = "import sys; sys.modules['vllm'] = None\nimport kvjax.adapters.vllm as a\nprint('imported')\na.install()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "imported\n"
    assert "needs vllm 0.16, 0.22, 0.32 or 0.33" in done.stderr.splitlines()[-1]


def test_a_manager_without_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingStackError, match=r"needs vllm 0\.16, 0\.22, 0\.32 or 0\.33; importing vllm failed"):
        KVCacheManager()


@release
def test_a_recorded_release_describes_itself(name: str) -> None:
    with installed(recorded(name)):
        found = describe_installed()
        check_description(recorded(name), found)
        assert {kind: found[kind] for kind in ("methods", "fields", "events")} == {
            kind: recorded(name)[kind] for kind in ("methods", "fields", "events")
        }


CHANGES = {
    "a method is missing": (lambda d: d["methods"]["KVCacheManager"].pop("free"), "KVCacheManager lacks 'free'"),
    "a method is new": (lambda d: d["methods"]["KVCacheManager"].update(park={}), "KVCacheManager has 'park'"),
    "a parameter is missing": (
        lambda d: d["methods"]["KVCacheManager"]["allocate_slots"].pop("num_lookahead_tokens"),
        "allocate_slots lacks 'num_lookahead_tokens'",
    ),
    "a parameter is new": (
        lambda d: d["methods"]["KVCacheManager"]["allocate_slots"].update(color=0),
        "allocate_slots has 'color'",
    ),
    "a default changed": (
        lambda d: d["methods"]["KVCacheManager"]["__init__"].update(enable_caching=None),
        "expected the default enable_caching=True, got None",
    ),
    "a field is missing": (lambda d: d["fields"]["KVCacheConfig"].remove("num_blocks"), "lacks 'num_blocks'"),
    "a field is new": (lambda d: d["fields"]["SlidingWindowSpec"].append("slope"), "SlidingWindowSpec has 'slope'"),
    "a spec is new": (lambda d: d["fields"].update(SpiralSpec=["block_size"]), "has 'SpiralSpec'"),
    "an event's field is new": (lambda d: d["events"]["BlockStored"].append("mood"), "BlockStored has 'mood'"),
}


@release
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_refused_by_its_name(name: str, change: str) -> None:
    edit, message = CHANGES[change]
    found = deepcopy(recorded(name))
    edit(found)
    with installed(found), pytest.raises(UnknownStackError, match=message):
        install()


@release
def test_a_request_without_an_attribute_is_refused_by_its_name(name: str) -> None:
    found = describe_with(name)
    found["request"].remove("block_hashes")
    with pytest.raises(UnknownStackError, match="Request lacks 'block_hashes'"):
        check_description(recorded(name), found)


def describe_with(name: str) -> dict[str, Any]:
    with installed(recorded(name)):
        return describe_installed()


def test_an_unknown_version_is_refused_by_what_differs_or_else_by_its_number() -> None:
    described = recorded(RELEASES[-1]) | {"version": "9.1.0"}
    with (
        installed(described),
        pytest.raises(UnknownStackError, match=r"vllm 9\.1 is not known .* knows 0\.16, 0\.22, 0\.32 or"),
    ):
        install()
    changed = deepcopy(described)
    changed["fields"]["KVCacheConfig"].append("aura")
    with installed(changed), pytest.raises(UnknownStackError, match="KVCacheConfig has 'aura'"):
        install()


def test_at_its_users_risk_an_unknown_release_runs_by_the_nearest_ones_rules(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning says what differs."""
    changed = deepcopy(recorded("0.22")) | {"version": "0.27.1"}
    changed["methods"]["KVCacheManager"]["allocate_slots"]["color"] = 0
    with installed(changed):
        with pytest.raises(UnknownStackError, match=r"has 'color'.*KVJAX_ANY_RELEASE=1 runs it"):
            install()
        monkeypatch.setenv("KVJAX_ANY_RELEASE", "1")
        assert install() is KVCacheManager
        uninstall()
        assert installed_release().rules == RULES["0.22"]
        assert installed_release().bind("allocate_slots", ["request", 4], {})["color"] == 0
    assert "has 'color'" in caplog.text


@pytest.mark.parametrize("value", ["yes", "2", " "])
def test_another_value_of_the_switch_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVJAX_ANY_RELEASE", value)
    with pytest.raises(ValueError, match=r"KVJAX_ANY_RELEASE of 0 or 1, got"):
        refuse_unless_allowed("it differs")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("0.9", "0.16"), ("0.16", "0.16"), ("0.31", "0.22"), ("0.34", "0.33"), ("1.0", "0.33")],
)
def test_the_nearest_release_is_the_newest_that_is_no_newer(name: str, nearest: str) -> None:
    assert nearest_release(name) == nearest


@release
def test_the_manager_has_every_method_of_the_release_with_its_parameters(name: str) -> None:
    """By name; those that only pass values on may come behind others."""
    for method, parameters in recorded(name)["methods"]["KVCacheManager"].items():
        own = inspect.getattr_static(KVCacheManager, method)
        if parameters is None:
            assert isinstance(own, property), method
        elif method != "__init__":
            assert set(parameters) <= set(inspect.signature(own).parameters), method


@release
def test_install_replaces_vllms_manager_and_uninstall_brings_it_back(name: str) -> None:
    with installed(recorded(name)) as vllm:
        places = [vllm.modules["vllm.v1.core.kv_cache_manager"], vllm.modules["vllm.v1.core.sched.scheduler"]]
        own = places[0].KVCacheManager
        install(eviction_policy="slru")
        cls = install()
        assert cls is KVCacheManager
        assert all(place.KVCacheManager is KVCacheManager for place in places)
        uninstall()
        uninstall()
        assert all(place.KVCacheManager is own for place in places)


def test_an_installed_vllm_is_as_it_was_recorded() -> None:
    """Runs where vLLM is installed (scripts/vllm_conformance.sh runs it there)."""
    vllm = pytest.importorskip("vllm")
    name = ".".join(vllm.__version__.split(".")[:2])
    if name not in RELEASES:
        pytest.skip(f"vllm {name} is not recorded")
    check_description(recorded(name), describe_installed())

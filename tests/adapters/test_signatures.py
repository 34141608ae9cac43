"""What differs from a recorded version of a stack is refused by its name; nothing is guessed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from kvjax.adapters.signatures import RECORDED, Stack, describe, recorded
from kvjax.errors import MissingStackError, UnknownStackError
from tests.adapters.stand_ins import stack_with

STACKS = sorted(path.name for path in RECORDED.iterdir())
EVERY = [
    (stack, i, name) for stack in STACKS for i, version in enumerate(recorded(stack)) for name in version["objects"]
]


@pytest.mark.parametrize(("stack", "version", "name"), EVERY)
def test_an_object_as_recorded_is_taken(stack: str, version: int, name: str) -> None:
    with stack_with(stack, version) as made:
        assert Stack(stack).load(name) is made[name]


@pytest.mark.parametrize(("stack", "version", "name"), EVERY)
def test_a_missing_and_a_new_name_are_told(stack: str, version: int, name: str) -> None:
    def change(objects: dict[str, Any]) -> None:
        wanted = objects[name]
        if "methods" in wanted:
            wanted["methods"].pop(sorted(wanted["methods"])[0])
            wanted["methods"]["park"] = []
        else:
            names = wanted.get("fields", wanted.get("parameters"))
            names.pop(0)
            names.append("park")

    with stack_with(stack, version, change), pytest.raises(UnknownStackError) as raised:
        Stack(stack).load(name)
    assert "expected " in str(raised.value)
    assert f"{name} lacks the " in str(raised.value)
    assert "'park'" in str(raised.value)
    assert "\n" not in str(raised.value)


def swap(names: list[str]) -> None:
    names[0], names[1] = names[1], names[0]


CHANGES: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (lambda o: swap(o["AttentionMetadata"]["fields"]), "has the field 'block_tables' in place 0"),
    (lambda o: o.pop("AttentionMetadata"), "it lacks 'AttentionMetadata'"),
]


@pytest.mark.parametrize(("change", "told"), CHANGES)
def test_another_order_and_a_missing_object_are_told(change: Callable[[dict[str, Any]], None], told: str) -> None:
    with stack_with("tpu_inference", 0, change), pytest.raises(UnknownStackError, match=told):
        Stack("tpu_inference").load("AttentionMetadata")


@dataclass
class Pages:
    """As EasyDeL's `CachePages`: the decorator writes its `__init__`."""

    page_ids: list[int]

    def get_page_ids(self) -> list[int]:
        return self.page_ids


def test_the_init_that_a_dataclass_generates_is_no_new_method() -> None:
    """Records are made of sources, which do not have it."""
    assert describe(Pages, {"methods": {"get_page_ids": []}}) == {"methods": {"get_page_ids": []}}
    own = {"methods": {"__init__": ["page_ids"], "get_page_ids": []}}
    assert describe(Pages, own) == own


@pytest.mark.parametrize("name", ["CacheManager", "CachePages"])
def test_at_its_users_risk_another_version_is_taken(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVJAX_ANY_RELEASE", "1")
    with stack_with("easydel", 0, lambda objects: objects[name]["methods"].update(park=[])) as made:
        assert Stack("easydel").load(name) is made[name]
    assert f"{name} has a new method 'park'" in caplog.text


@pytest.mark.parametrize("stack", STACKS)
def test_adapters_import_without_their_stack_and_fail_on_use_with_one_line(stack: str) -> None:
    """The line names the package and the versions."""
    top = next(iter(recorded(stack)[0]["objects"].values()))["module"].split(".")[0]
    code = f"import sys; sys.modules[{top!r}] = None\nimport kvjax.adapters.{stack}"
    subprocess.run([sys.executable, "-c", code], check=True)
    name = next(iter(recorded(stack)[0]["objects"]))
    content = recorded(stack)[0]
    told = f"needs {content['package']} .*{content['version']}.*importing"
    kept = sys.modules.get(top)
    sys.modules[top] = None  # type: ignore[assignment]
    try:
        with pytest.raises(MissingStackError, match=told) as raised:
            Stack(stack).load(name)
    finally:
        del sys.modules[top]
        if kept is not None:
            sys.modules[top] = kept
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("stack", "name"), sorted({(stack, name) for stack, _, name in EVERY}))
def test_the_installed_stack_looks_as_recorded(stack: str, name: str) -> None:
    top = next(iter(recorded(stack)[0]["objects"].values()))["module"].split(".")[0]
    if importlib.util.find_spec(top) is None:
        pytest.skip(f"{recorded(stack)[0]['package']} is not installed")
    Stack(stack).load(name)

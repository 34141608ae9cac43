"""scripts/mutation: what is sampled, that a sample stays as the tree grows, and how a change gets into functions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray")
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from mutation.functions import CannotPatchError, functions_by_code, patch_functions
from mutation.operators import SwapAugmented, SwapMembership, SwapName
from mutation.results import diff_of
from mutation.sites import Change, sample
from mutation.test_lines import TestLines, TestRecord

SOURCE = '''"""A module: 1 + 1."""
from __future__ import annotations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from os import PathLike
    SIZE = 1 + 1

Name = str | None
LIMIT = 3


class Counter:
    def __init__(self, start: int | None = 0) -> None:
        self.total = start

    def __repr__(self) -> str:
        return "x" * 3

    def add(self, values: list[int], strict: bool | None) -> int | None:
        for value, _ in zip(values, values, strict=True):
            if (
                value > LIMIT
                and value not in (5,)
            ):
                raise ValueError(f"expected {LIMIT + 1}")
            self.total += max(value, 0)
        return self.total


def plain(*values, key, **rest):
    return {"a": sum(values), **rest}
'''


def changes_of(folder: Path, source: str, seed: int = 0, count: int = 1000) -> list[Change]:
    (folder / "core").mkdir(exist_ok=True)
    (folder / "core" / "module.py").write_text(source)
    return sample(folder, ["core"], seed, count)


def test_what_no_test_should_hold_is_left_out(tmp_path: Path) -> None:
    changes = changes_of(tmp_path, SOURCE)
    assert {change.text for change in changes} == {
        "LIMIT = 3",
        "def __init__(self, start: int | None = 0) -> None:",
        "for value, _ in zip(values, values, strict=True):",
        "if (",
        "value > LIMIT",
        "and value not in (5,)",
        "self.total += max(value, 0)",
    }
    assert {change.text for change in changes if change.at_import} == {
        "LIMIT = 3",
        "def __init__(self, start: int | None = 0) -> None:",
    }


def test_every_change_is_a_program_and_differs_in_one_line(tmp_path: Path) -> None:
    for change in changes_of(tmp_path, SOURCE):
        mutated = change.mutated(SOURCE)
        compile(mutated, "module.py", "exec")
        before, after = diff_of(SOURCE, mutated)
        assert before != after


def test_a_difference_of_several_lines_is_told() -> None:
    assert diff_of("for x in [\n    1,\n]:\n    f(x)", "for x in []:\n    f(x)") == [
        "- for x in [",
        "- 1,",
        "- ]:",
        "+ for x in []:",
    ]


def test_a_sample_stays_as_the_module_grows(tmp_path: Path) -> None:
    """Keys of equal lines in equal functions are equal, wherever these stand."""
    before = {change.key for change in changes_of(tmp_path, SOURCE)}
    grown = SOURCE.replace("class Counter", "def other(x):\n    return x + 1\n\n\nclass Counter")
    after = {change.key for change in changes_of(tmp_path, grown)}
    assert len(before) > 9
    assert before < after
    assert changes_of(tmp_path, SOURCE, seed=1, count=4) != changes_of(tmp_path, SOURCE, count=4)


def test_a_condition_over_lines_is_one_statement(tmp_path: Path) -> None:
    (change,) = [change for change in changes_of(tmp_path, SOURCE) if change.text == "value > LIMIT"]
    condition = SOURCE.splitlines().index("            if (") + 1
    assert set(range(condition, condition + 4)) <= set(change.lines)
    lines = TestLines(tests={"t": TestRecord(1.0, {"core/module.py": f"{1 << condition:x}"})})
    assert lines.selected(change, ["t"]) == ["t"]


@pytest.mark.parametrize("operator", [SwapName, SwapAugmented, SwapMembership])
def test_operators_change_their_examples(operator: type) -> None:
    from cosmic_ray.mutating import mutate_code

    for example in operator.examples():
        assert mutate_code(example.pre_mutation_code, operator(), example.occurrence) == example.post_mutation_code


def test_the_quickest_case_of_every_function_comes_first() -> None:
    seconds = {"a[1]": 0.1, "a[2]": 0.2, "b[1]": 0.5, "c": 9.0, "d": 0.01}
    tests = {name: TestRecord(s, {"m.py": "0" if name == "d" else "8"}) for name, s in seconds.items()}
    change = Change("m.py", 3, 0, "", 0, "f", "", "", False, (3,))
    assert TestLines(tests=tests).selected(change, list(tests)) == ["a[1]", "b[1]", "c", "a[2]"]


def test_functions_take_their_changed_code_and_stay_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "patched_module.py"
    source = "class A:\n    def f(self):\n        return [x + 1 for x in (1, 2)]\n\n    g = f\n\n\nLIMIT = 3\n"
    path.write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    import patched_module  # type: ignore[import-not-found]

    bound = patched_module.A().f
    functions = functions_by_code(tmp_path)
    patch_functions(path, source, source.replace("x + 1", "x - 1"), functions)
    assert bound() == patched_module.A().g() == [0, 1]
    with pytest.raises(CannotPatchError, match="no function differs"):
        patch_functions(path, source, source.replace("LIMIT = 3", "LIMIT = 4"), functions)

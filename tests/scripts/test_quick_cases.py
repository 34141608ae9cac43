"""Which cases the test command runs: some of every test that is named, and all of every other."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.quick_cases import SHARES, SWEEPS, kept_cases
from tests.conftest import KEPT_CASES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("test", KEPT_CASES)
def test_what_is_named_is_there(test: str) -> None:
    """A test that was renamed would run all its cases, unseen."""
    path, *_, name = test.split("::")
    assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")
    assert (KEPT_CASES[test] == 0) == (test in SWEEPS)


def test_long_tests_keep_a_share_and_at_least_one_case() -> None:
    """Of a share of their own, a case more than every third of 12: those might all be of one level."""
    thirds = next(test for test, share in SHARES.items() if share == 3)
    seconds = {
        "tests/a.py::long": [1.0] * 13,
        "tests/a.py::short": [0.01] * 13,
        thirds: [1.0] * 12,
        "tests/a.py::few": [3.0, 3.0],
        "tests/a.py::alone": [30.0],
        "tests/core/b.py::law": [1.0] * 13,
    }
    kept = {"tests/a.py::few": 1, "tests/a.py::long": 3, thirds: 5}
    assert kept_cases(seconds, 2.0, 6) == kept | dict.fromkeys(SWEEPS, 0)

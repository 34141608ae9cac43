"""The README's Python examples run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_readme_is_short_and_has_an_example() -> None:
    assert EXAMPLES
    assert README.count("\n") <= 120


@pytest.mark.parametrize("code", EXAMPLES, ids=[f"example{i}" for i in range(len(EXAMPLES))])
def test_examples_run(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("path", re.findall(r"\]\(([^)#:]+)\)", README))
def test_links_lead_somewhere(path: str) -> None:
    assert (Path(__file__).parent.parent / path).exists()

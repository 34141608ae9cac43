"""The docs' code runs as it stands: Python blocks, and `kvjax` commands of shell blocks; the site has every page."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from kvjax.cli.main import main

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
VERSIONING = (ROOT / "docs" / "versioning.md").read_text(encoding="utf-8")
FOLDERS = (path.parent.name for path in (ROOT / "kvjax").glob("*/__init__.py"))
PACKAGES = sorted(f"kvjax.{name}" for name in (*FOLDERS, "errors", "nnx"))
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
SHELL = re.compile(r"```bash\n(.*?)```", re.DOTALL)
PYTHON_BLOCKS = [
    pytest.param(code, id=f"{page.stem}-{i}")
    for page in PAGES
    for i, code in enumerate(PYTHON.findall(page.read_text(encoding="utf-8")))
]
COMMANDS = [
    pytest.param(line, id=f"{page.stem}-{i}")
    for page in PAGES
    for i, line in enumerate(
        line
        for block in SHELL.findall(page.read_text(encoding="utf-8"))
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith("kvjax ")
    )
]


@pytest.mark.parametrize("code", PYTHON_BLOCKS)
def test_python_runs(code: str) -> None:
    for stack in re.findall(r"kvjax\.adapters\.(\w+)", code):
        pytest.importorskip(stack)
    exec(compile(code, "docs", "exec"), {"__name__": "docs"})


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out


def test_the_guide_has_code() -> None:
    """A page without a block that runs would go stale unseen."""
    for page in (ROOT / "docs" / "guide").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert PYTHON.search(text) or "\nkvjax " in text, page


def test_the_site_lists_every_page() -> None:
    """And nothing else."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"^ +- .*: (\S+\.md)$", text, re.MULTILINE))
    excluded = set(re.findall(r"^  /(\S+\.md)$", text, re.MULTILINE))
    assert listed | excluded == {page.relative_to(ROOT / "docs").as_posix() for page in PAGES}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_says_what_is_public_and_whether_it_is_stable(name: str) -> None:
    """It has `__all__`, a reference page, and a line that promises."""
    module = importlib.import_module(name)
    assert module.__all__
    page = (ROOT / "docs" / "reference" / f"{name.removeprefix('kvjax.')}.md").read_text(encoding="utf-8")
    assert f"::: {name}" in page
    promises = re.findall(rf"^\| `{name}` \| (library|laboratory) \|$", VERSIONING, re.MULTILINE)
    assert len(promises) == 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for path in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / path).exists(), path

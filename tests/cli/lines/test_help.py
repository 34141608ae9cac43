"""Laws of every command's help: sentences, one style of defaults, choices listed, and examples that run."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest

from kvjax.cli.commands import check
from kvjax.cli.help_text import Example
from kvjax.cli.main import COMMANDS, main
from kvjax.cli.parser import OneLineParser
from pallas_kernels.merge_states.cases import MergeCase

SENTENCES = re.compile(r"([A-Z-].*[.])(?: \[default: [^\[\]]+\])?")
UNITS = {"ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds", "gb": "GB"}
SLOW = ("generate", "bench")  # their examples compile
TRACE = '{"timestamp": %d, "input_length": 1024, "output_length": 8, "hash_ids": [%d, %d]}\n'


def parser_of(name: str) -> OneLineParser:
    parser = OneLineParser(prog=f"kvjax {name}")
    parser.add_command(importlib.import_module(f"kvjax.cli.commands.{name}"))
    return parser


def examples_of(name: str) -> tuple[Example, ...]:
    found: tuple[Example, ...] = importlib.import_module(f"kvjax.cli.commands.{name}").EXAMPLES
    return found


def words_of(line: str) -> list[str]:
    """The command alone, without what a shell does with its output."""
    return shlex.split(line.partition(" | ")[0].removeprefix('eval "$(').removesuffix(')"'))


ACTIONS = [
    pytest.param(action, id=f"{name}{(action.option_strings or [' ' + action.dest])[0]}")
    for name in COMMANDS
    for action in parser_of(name)._actions
]
EXAMPLES = [(name, example.line) for name in COMMANDS for example in examples_of(name)]


@pytest.mark.parametrize("action", ACTIONS)
def test_an_option_is_told_in_sentences(action: argparse.Action) -> None:
    """One or more, each with a capital and a stop; the default behind them and nowhere else."""
    assert action.help is not None
    told = SENTENCES.fullmatch(action.help)
    assert told is not None, action.help
    assert "(default" not in action.help
    assert "%" not in action.help
    for part in (action.option_strings or ["-"])[0].strip("-").split("-"):
        assert UNITS.get(part, "") in action.help, f"{part}: {action.help}"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_default_is_shown_where_there_is_one_and_choices_are_listed(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = parser_of(name)
    text = " ".join(parser.format_help().split())
    for action in parser._actions:
        if not action.option_strings or action.help is None:
            continue
        shown = text[text.index(f"{action.option_strings[-1]} ") :]
        if action.default not in (None, argparse.SUPPRESS, [], False, True):
            assert re.search(r"\[default: ", shown[: len(action.help) + 120]), action
        if action.choices is not None:
            assert f"[choices: {', '.join(action.choices)}]" in shown, action


@pytest.mark.parametrize("name", COMMANDS)
def test_many_options_are_grouped(name: str) -> None:
    """No group has more than a screen's half; the first has what belongs to none."""
    for group in parser_of(name)._action_groups:
        assert len(group._group_actions) <= 20, group.title


@pytest.mark.parametrize("name", COMMANDS)
def test_usage_is_one_line_and_two_examples_end_the_help(name: str) -> None:
    text = parser_of(name).format_help()
    assert text.startswith(f"usage: kvjax {name} [OPTIONS]")
    assert text.splitlines()[1] == ""
    told = text[text.index("\nexamples:\n") :]
    assert [line.strip() for line in told.splitlines() if line.startswith("    $ ")] == [
        f"$ {example.line}" for example in examples_of(name)
    ]
    assert len(examples_of(name)) >= 2
    assert all(example.what[0].isupper() and example.what.endswith(".") for example in examples_of(name))


@pytest.mark.parametrize(("name", "line"), EXAMPLES)
def test_an_example_is_a_line_that_the_command_takes(name: str, line: str) -> None:
    words = words_of(line)
    assert words[:2] == ["kvjax", name]
    parser_of(name).parse_args(words[2:])


@pytest.mark.parametrize(
    ("name", "line"),
    [pytest.param(*case, marks=[pytest.mark.sweep] if case[0] in SLOW else []) for case in EXAMPLES],
)
def test_an_example_runs(
    name: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside files of the names that examples have; kvjax check over one op."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check, "case_types", lambda: {"merge_states": MergeCase})
    (tmp_path / "trace.jsonl").write_text("".join(TRACE % (1_000 * i, i // 2, i) for i in range(6)))
    (tmp_path / "prompts.txt").write_text("The cache\nA page\n")
    (tmp_path / "program.py").write_text("print('served')\n")
    if name == "completion":
        pytest.importorskip("argcomplete")
    words = [sys.executable if word == "python" else word for word in words_of(line)]
    assert main(words[1:]) == 0
    assert capsys.readouterr().out
    assert all((tmp_path / word).stat().st_size for word in words if word.endswith(".json"))

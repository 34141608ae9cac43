"""The recording of a newcomer's first commands: how outputs are shortened, and that the page has every command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from record_first_hour import COMMANDS, HEAD, MAX_WIDTH, PAGE, TAIL, Command, run, shortened


@pytest.mark.parametrize("num_lines", [0, 1, HEAD + TAIL + 1])
def test_a_short_output_is_whole(num_lines: int) -> None:
    lines = [f"line {i}" for i in range(num_lines)]
    assert shortened("\n".join(lines) + "\n\n") == lines


@pytest.mark.parametrize("num_lines", [HEAD + TAIL + 2, 500])
def test_a_long_output_keeps_its_ends_and_says_what_is_left_out(num_lines: int) -> None:
    lines = [f"line {i}" for i in range(num_lines)]
    kept = shortened("\n".join(lines))
    assert kept == [*lines[:HEAD], f"... {num_lines - HEAD - TAIL} more lines ...", *lines[-TAIL:]]


def test_a_long_line_keeps_its_ends() -> None:
    whole, cut = shortened("x" * MAX_WIDTH + "\n" + "y" * MAX_WIDTH + "z" * MAX_WIDTH)
    assert whole == "x" * MAX_WIDTH
    assert len(cut) == MAX_WIDTH
    start, end = cut.split(" ... ")
    assert set(start) == {"y"}
    assert set(end) == {"z"}


def test_a_command_that_ends_otherwise_is_an_error(tmp_path: Path) -> None:
    """Its output is both streams, as they come."""
    line = "python -c \"import sys; print('out', flush=True); sys.exit('err')\""
    output, seconds = run(Command("", "", line, status=1), tmp_path)
    assert output == "out\nerr\n"
    assert seconds > 0
    with pytest.raises(RuntimeError, match=r"expected status 0 of .*, got 1: out"):
        run(Command("", "", line), tmp_path)


def test_the_page_has_the_commands_in_their_order() -> None:
    text = PAGE.read_text(encoding="utf-8")
    recorded = [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]
    assert recorded == [command.line for command in COMMANDS]
    assert len(COMMANDS) == 10

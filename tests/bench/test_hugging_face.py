"""The process that runs Hugging Face: what it answers, and what is said where it cannot run."""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
from pathlib import Path

import pytest

from kvjax.bench.hugging_face import HuggingFaceProcess
from kvjax.demo import demo_model_path
from kvjax.errors import MissingExtraError

HAS_TORCH = importlib.util.find_spec("torch") is not None and importlib.util.find_spec("transformers") is not None

ANSWERS = """
import json, sys
print(json.dumps({"versions": {"torch": "0", "transformers": "0"}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    tokens = [[len(prompt)] * request["num_new_tokens"] for prompt in request["prompts"]]
    print(json.dumps({"run": {"cpu_s": 1.0, "wall_s": 2.0, "tokens": tokens}}), flush=True)
"""


def interpreter(folder: Path, program: str) -> str:
    """An interpreter that runs `program`, whatever it is asked to run."""
    script, python = folder / "program.py", folder / "python"
    script.write_text(program)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return str(python)


def test_every_call_is_answered_in_order(tmp_path: Path) -> None:
    with HuggingFaceProcess(tmp_path, python=interpreter(tmp_path, ANSWERS)) as process:
        assert process.versions == {"torch": "0", "transformers": "0"}
        first = process.generate([[1, 2, 3], [4]], 2)
        second = process.generate([[5]], 1)
    assert (first.tokens, first.cpu_s, first.wall_s) == ([[3, 3], [1, 1]], 1.0, 2.0)
    assert second.tokens == [[1]]


def test_an_interrupt_from_the_terminal_does_not_reach_it(tmp_path: Path) -> None:
    """The terminal sends it to the foreground process group."""
    with HuggingFaceProcess(tmp_path, python=interpreter(tmp_path, ANSWERS)) as process:
        assert os.getpgid(process._process.pid) != os.getpgrp()


def test_a_process_that_ends_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with status 3"):
        HuggingFaceProcess(tmp_path, python=interpreter(tmp_path, "raise SystemExit(3)"))


def test_a_process_that_ends_between_calls_is_an_error(tmp_path: Path) -> None:
    program = "print('{\"versions\": {}}', flush=True)"
    with HuggingFaceProcess(tmp_path, python=interpreter(tmp_path, program)) as process:
        process._process.wait()
        with pytest.raises(RuntimeError, match="ended with status 0"):
            process.generate([[1]], 1)


@pytest.mark.skipif(HAS_TORCH, reason="torch and transformers are installed")
def test_without_its_libraries_the_extra_is_named() -> None:
    with pytest.raises(MissingExtraError, match=r"comparing with Hugging Face needs .* pip install 'kvjax\[oracle\]'"):
        HuggingFaceProcess(demo_model_path())


@pytest.mark.skipif(not HAS_TORCH, reason="torch or transformers is not installed")
def test_padding_on_the_left_changes_no_token() -> None:
    prompts = [[2, 100, 200, 300], [2, 400]]
    with HuggingFaceProcess(demo_model_path()) as process:
        together = process.generate(prompts, 4)
        alone = [process.generate([prompt], 4).tokens[0] for prompt in prompts]
    assert together.tokens == alone
    assert together.cpu_s > 0
    assert together.wall_s > 0

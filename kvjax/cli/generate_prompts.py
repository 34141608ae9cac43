"""Where the prompts of `kvjax generate` come from: the command line, a file, or the demo's conversations.

Flow:    --prompt, --prompts FILE, kvjax.demo -> [read_prompts] -> named prompts
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvjax.demo import demo_requests


@dataclass(frozen=True)
class NamedPrompt:
    """One prompt and what reports call it."""

    name: str
    text: str


def read_prompts(prompts: Sequence[str] | None, file: Path | None) -> list[NamedPrompt]:
    """The prompts of the command line and the file, or the demo's where neither is given.

    Raises:
        ValueError: a line of the file is not a prompt (`path:line` in the message), a name repeats, or there is no
            prompt at all.
    """
    if not prompts and file is None:
        return [NamedPrompt(request.name, request.prompt) for request in demo_requests()]
    named = [NamedPrompt(f"prompt-{i}", text) for i, text in enumerate(prompts or (), start=1)]
    if file is not None:
        named += _read_jsonl(file) if file.suffix == ".jsonl" else _read_lines(file)
    if not named:
        raise ValueError(f"expected at least one prompt in {file}, got none")
    names = [prompt.name for prompt in named]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"expected prompts of different names, got {', '.join(repeated)} more than once")
    for prompt in named:
        if not prompt.text:
            raise ValueError(f"expected text in prompt {prompt.name}, got none")
    return named


def _read_lines(file: Path) -> list[NamedPrompt]:
    """A prompt a line; empty lines are passed over."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return [NamedPrompt(f"line-{number}", line) for number, line in enumerate(lines, start=1) if line.strip()]


def _read_jsonl(file: Path) -> list[NamedPrompt]:
    """A JSON string a line, or an object with "prompt" and perhaps "name"; for prompts of several lines."""
    named = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{file}:{number}: expected JSON, got {error}") from error
        if isinstance(value, str):
            value = {"prompt": value}
        if not isinstance(value, dict) or not isinstance(value.get("prompt"), str) or set(value) - {"prompt", "name"}:
            raise ValueError(
                f'{file}:{number}: expected a string, or an object with "prompt" and perhaps "name", got {line[:80]}'
            )
        named.append(NamedPrompt(str(value.get("name", f"line-{number}")), value["prompt"]))
    return named

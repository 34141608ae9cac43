"""Where the prompts of `kvjax generate` come from: the command line, a file, or the demo's conversations.

Flow:    --prompt, --prompts FILE, kvjax.demo -> [read_prompts] -> named prompts -> [samples_of] -> a name a request
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvjax.cli.generate.token_text import token_id_text
from kvjax.cli.running.output_files import STANDARD_INPUT, input_file
from kvjax.demo import demo_requests
from kvjax.engine.requests.engine_request import sample_ids

Line = tuple[int, str]  # number from 1 and text, not blank
GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class NamedPrompt:
    """One prompt and what reports call it."""

    name: str
    text: str  # of a prompt of token ids: these, for reports
    token_ids: tuple[int, ...] | None = None
    chat: dict[str, Any] | None = None  # "messages" and perhaps "tools", whose text is the template's
    inputs: Path | None = None  # .npz of what it is given with


def prompts_file(text: str) -> Path:
    """An argument's path to prompts, or that of standard input."""
    return Path(input_file(text))


def read_prompts(prompts: Sequence[str] | None, file: Path | None) -> list[NamedPrompt]:
    """The prompts of the command line and the file, or the demo's where neither is given.

    Raises:
        ValueError: a line of the file is not a prompt (`path:line` in the message), a name repeats, a text is empty
            or not Unicode, or there is no prompt at all.
    """
    if not prompts and file is None:
        return [NamedPrompt(request.name, request.prompt) for request in demo_requests()]
    named = [NamedPrompt(f"prompt-{i}", text) for i, text in enumerate(prompts or (), start=1)]
    if file is not None:
        lines = list(_lines(file))
        named += _read_jsonl(file, lines) if _is_jsonl(file, lines) else _read_lines(lines)
    if not named:
        raise ValueError(f"expected at least one prompt in {file}, got none")
    _check_names(named, "prompts")
    for prompt in named:
        if not prompt.text:
            raise ValueError(f"expected text in prompt {prompt.name}, got none")
        if not _is_unicode(prompt.text if prompt.chat is None else json.dumps(prompt.chat, ensure_ascii=False)):
            raise ValueError(f"expected Unicode text in prompt {prompt.name}, got {prompt.text[:80]!r}")
    return named


def samples_of(prompts: Sequence[NamedPrompt], n: int) -> list[NamedPrompt]:
    """Each prompt `n` times, under the names of the requests that sample it.

    Raises:
        ValueError: a sample of one prompt would be called as another prompt is.
    """
    named = [replace(prompt, name=name) for prompt in prompts for name in sample_ids(prompt.name, n)]
    _check_names(named, "samples")
    return named


def _check_names(named: Sequence[NamedPrompt], what: str) -> None:
    repeated = sorted(name for name, count in Counter(prompt.name for prompt in named).items() if count > 1)
    if repeated:
        raise ValueError(f"expected {what} of different names, got {', '.join(repeated)} more than once")


def _is_jsonl(file: Path, lines: Sequence[Line]) -> bool:
    """By its name, but for standard input, which has none."""
    if str(file) == STANDARD_INPUT:
        return bool(lines) and lines[0][1].lstrip().startswith("{")
    return file.name.removesuffix(".gz").endswith(".jsonl")


def _read_lines(lines: Sequence[Line]) -> list[NamedPrompt]:
    """A prompt a line."""
    return [NamedPrompt(f"line-{number}", line) for number, line in lines]


def _read_jsonl(file: Path, lines: Sequence[Line]) -> list[NamedPrompt]:
    """A JSON string a line, or an object; for prompts of several lines, of token ids, or with further inputs."""
    named, folder = [], Path() if str(file) == STANDARD_INPUT else file.parent
    for number, line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}:{number}: expected JSON, got {error}") from error
        prompt = _parse_prompt({"prompt": value} if isinstance(value, str) else value, f"line-{number}", folder)
        if prompt is None:
            raise ValueError(
                f'{file}:{number}: expected a string, or an object with "prompt", "prompt_token_ids" or "messages" '
                f'(with "tools") and perhaps "name" and "inputs" (an .npz), got {line[:80]}'
            )
        named.append(prompt)
    return named


def _parse_prompt(value: Any, name: str, folder: Path) -> NamedPrompt | None:
    """The prompt of a line; None where it is none. Paths are relative to `folder`."""
    if not isinstance(value, dict):
        return None
    fields = {"name": name, **value}
    inputs, ids, text = fields.pop("inputs", None), fields.pop("prompt_token_ids", None), fields.pop("prompt", None)
    messages, tools, name = fields.pop("messages", None), fields.pop("tools", None), fields.pop("name")
    if fields or not isinstance(name, str) or sum(each is not None for each in (ids, text, messages)) != 1:
        return None
    if not all(each is None or isinstance(each, str) for each in (inputs, text)):
        return None
    path = None if inputs is None else folder / inputs
    if messages is not None:
        return _chat_of(name, messages, tools, path)
    if tools is not None:
        return None
    if ids is None:
        return NamedPrompt(name, str(text), inputs=path)
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        return None
    return NamedPrompt(name, token_id_text(ids), tuple(ids), inputs=path)


def _chat_of(name: str, messages: Any, tools: Any, path: Path | None) -> NamedPrompt | None:
    """A chat, which reports call by its last message; None where it is none."""
    for each in (messages, [] if tools is None else tools):
        if not isinstance(each, list) or not all(isinstance(one, dict) for one in each):
            return None
    if not messages:
        return None
    content = messages[-1].get("content")
    text = content if isinstance(content, str) and content else json.dumps(messages[-1], ensure_ascii=False)
    return NamedPrompt(name, text, chat={"messages": messages, "tools": tools}, inputs=path)


def _is_unicode(text: str) -> bool:
    """False with a lone surrogate: bytes of the command line that are no UTF-8, or such an escape in JSON."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _lines(file: Path) -> Iterator[Line]:
    """Lines that are not blank, with their numbers; only newlines end one, as in JSON lines."""
    data = file.read_bytes()
    try:
        text = (gzip.decompress(data) if data.startswith(GZIP) else data).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: expected UTF-8, got {error}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file}: expected whole gzip data, got {error}; copy the file again") from error
    for number, line in enumerate(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), start=1):
        if line.strip():
            yield number, line

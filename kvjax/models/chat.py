"""Messages of a chat as tokens, by the checkpoint's own template, and where other chats part from it.

Flow:    messages, tools -> [ChatTemplate.render] -> text -> Tokenizer -> [ChatPrompt] -> LLMEngine.add_chat
Source:  files and variables of transformers' `apply_chat_template`; Jinja in its sandbox

A chat is asked for again with other messages from some turn on: another question behind the same system prompt and
tools, an edited question, another answer. So the places where turns begin are checkpoints (`Request.checkpoints`). A
template is a program: what it writes before a turn is found by rendering the chat with other contents there.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvjax.core.requests.request import MAX_CHECKPOINTS
from kvjax.errors import ConfigError
from kvjax.extras import require_extra

if TYPE_CHECKING:
    from kvjax.models.load import LoadedModel

Message = Mapping[str, Any]  # "role", "content" and what else the template reads
NOT_PARTED_FROM = ("system", "developer", "assistant")  # roles whose messages other chats have too, or compute
OTHERS = ("?", "!")  # contents of other chats' turns: one of them begins unlike the chat's
FIRST_TURNS = 4  # whose beginnings are checkpoints, beside those of the last turns
LAST_TURNS = 4


class ChatPrompt(NamedTuple):
    """A chat's prompt for `LLMEngine.add_request`."""

    token_ids: list[int]
    checkpoints: tuple[int, ...]  # tokens before which other chats part, ascending


class ChatTemplate:
    """The Jinja templates of one folder. What they may call is the sandbox's choice: nothing that changes a value."""

    def __init__(self, templates: Mapping[str, str], variables: Mapping[str, str]) -> None:
        """`templates` by name, "default" among them; `variables` are special tokens, as `bos_token`."""
        self._sources, self._variables = dict(templates), dict(variables)

    @classmethod
    def from_folder(cls, folder: str | Path) -> ChatTemplate | None:
        """The templates of a model folder: chat_template.jinja, or those of tokenizer_config.json. None: it has none.

        Raises:
            ConfigError: one of the files cannot be read.
        """
        folder = Path(folder)
        config = _read_json(folder / "tokenizer_config.json")
        found = config.get("chat_template")
        alone = folder / "chat_template.jinja"
        if alone.is_file():
            found = _read_text(alone)
        if isinstance(found, str):
            found = [{"name": "default", "template": found}]
        if not found:
            return None
        try:
            templates = {str(each["name"]): str(each["template"]) for each in found}
        except (TypeError, KeyError) as error:
            raise ConfigError(f"{folder}: expected chat_template as text, or a list of names and templates") from error
        if "default" not in templates:
            raise ConfigError(f"{folder}: expected a chat template called default, got {', '.join(templates)}")
        special = {**_read_json(folder / "special_tokens_map.json"), **config}
        tokens = {name: _content_of(token) for name, token in special.items() if name.endswith("_token")}
        return cls(templates, {name: token for name, token in tokens.items() if token is not None})

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text of a chat; `add_generation_prompt` begins the next answer, `variables` are the template's own.

        Raises:
            ValueError: the template refuses the messages, or fails over them.
            MissingExtraError: jinja2 is not installed.
        """
        given = {**self._variables, **variables, "messages": messages, "tools": tools}
        template = self._compiled["tool_use" if tools and "tool_use" in self._sources else "default"]
        try:
            return str(template.render(**given, add_generation_prompt=add_generation_prompt))
        except Exception as error:  # whatever a program of the checkpoint's raises
            raise ValueError(f"the model's chat template refuses the messages: {error}") from error

    def turn_starts(self, text: str, messages: Sequence[Message], **given: Any) -> list[int]:
        """Characters of the rendered chat, `text`, before what other chats say at a turn; `given` as for `render`.

        Turns are those of users and tools, the first and the last ones. A turn where the template refuses other
        contents has none.
        """
        turns = [i for i, message in enumerate(messages) if message.get("role") not in NOT_PARTED_FROM]
        chosen = turns if len(turns) <= FIRST_TURNS + LAST_TURNS else [*turns[:FIRST_TURNS], *turns[-LAST_TURNS:]]
        return sorted({start for i in chosen for start in self._start_of(text, messages, i, given)})

    def _start_of(self, text: str, messages: Sequence[Message], turn: int, given: Mapping[str, Any]) -> list[int]:
        """What the chat has in common with those that go on otherwise from a turn on; empty: nothing."""
        try:
            others = [
                self.render([*messages[:turn], {**messages[turn], "content": content}], **given) for content in OTHERS
            ]
        except ValueError:
            return []
        start = min(_num_common(text, other) for other in others)
        return [start] if start else []

    @cached_property
    def _compiled(self) -> dict[str, Any]:
        require_extra("jinja2", "hf", "a chat template")
        from jinja2.exceptions import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _answer_tag()]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.globals["raise_exception"] = _raise_template_error
        try:
            return {name: environment.from_string(source) for name, source in self._sources.items()}
        except TemplateError as error:
            raise ValueError(f"expected a chat template in Jinja, got one that cannot be read: {error}") from error


def chat_prompt(
    model: LoadedModel,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> ChatPrompt:
    """Tokens of a chat that the model is to answer, and its checkpoints; `variables` go to the template.

    Raises:
        ValueError: the model has no tokenizer or no chat template, or the template refuses the messages.
    """
    if model.tokenizer is None:
        raise ValueError(f"expected token ids, got a chat: {model.no_tokenizer}")
    template = model.chat_template
    if template is None:
        raise ValueError("expected a model with a chat template, got one whose folder has none: give it as a prompt")
    if not messages or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError("expected messages as one or more mappings of role and content")
    text = template.render(messages, tools=tools, **variables)
    token_ids, ends = model.tokenizer.encode_plain(text)
    starts = template.turn_starts(text, messages, tools=tools, **variables)
    named = sorted({bisect_right(ends, start) for start in starts} - {0})
    return ChatPrompt(token_ids, tuple(named[-MAX_CHECKPOINTS:]))


def _num_common(text: str, other: str) -> int:
    """Characters with which both begin."""
    least, most = 0, min(len(text), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if text.startswith(other[:middle]) else (least, middle - 1)
    return least


def _read_json(file: Path) -> dict[str, Any]:
    """The object of a file; empty where there is no such file."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: expected JSON, got {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: expected an object, got {type(found).__name__}")
    return found


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: expected UTF-8, got {error}") from error


def _content_of(token: Any) -> str | None:
    """The text of a special token, which may stand with its properties."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_template_error(message: str) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)


def _answer_tag() -> Any:
    """`{% generation %} ... {% endgeneration %}`, which marks answers for training: its contents as they are."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class AnswerTag(Extension):
        tags = {"generation"}  # noqa: RUF012 (Jinja's own attribute)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    return AnswerTag


__all__ = ["ChatPrompt", "ChatTemplate", "Message", "chat_prompt"]

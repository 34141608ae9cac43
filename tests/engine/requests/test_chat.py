"""Chats by a checkpoint's template: its text, what it may not do, and checkpoints where other chats part."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from kvjax.cli.main import main
from kvjax.demo import demo_model_path
from kvjax.engine import AsyncLLMEngine, EngineConfig, LLMEngine, SamplingParams
from kvjax.errors import ConfigError
from kvjax.models import ChatTemplate, LoadedModel, Tokenizer, chat_prompt, load_model
from kvjax.models.chat import FIRST_TURNS, LAST_TURNS
from tests.models.families import drain

MARKED = """{{ bos_token }}
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}<a>{% generation %}{{ message.content }}{% endgeneration %}</a>
    {%- else %}<{{ message.role }}>{{ message.content | trim }}</{{ message.role }}>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<a>{% endif %}"""
ALTERNATING = """{%- if messages[0].role == 'system' %}
    {%- set system, messages = messages[0].content, messages[1:] %}
{%- else %}{%- set system = 'none' %}{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if loop.first %}[{{ system }}]{% endif %}
    {%- if loop.last %}({{ message.content }}){% continue %}{% endif %}
    {{- '(' + message.content + ')' }}
{%- endfor %}"""
TEMPLATES = {"marked": MARKED, "alternating": ALTERNATING}
SYSTEM = {"role": "system", "content": "Answer in one word."}


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {"bos_token": "~"})


def byte_tokenizer() -> Tokenizer:
    """A token a byte, and one that a post-processor puts first."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({character: i for i, character in enumerate([*alphabet, "<first>"])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<first> $A", special_tokens=[("<first>", 256)])
    return Tokenizer(backend)


CONFIG = EngineConfig(block_size=4, num_blocks=400, max_model_len=160, max_num_seqs=2, max_buckets=1)


@functools.cache
def demo_model() -> LoadedModel:
    return load_model(demo_model_path())


@functools.cache
def compiled() -> LLMEngine:
    """Its step serves all engines here."""
    return LLMEngine(demo_model(), CONFIG)


def model_of(source: str | None) -> LoadedModel:
    chats = None if source is None else template(source)
    return dataclasses.replace(demo_model(), tokenizer=byte_tokenizer(), chat_template=chats)


def chat(num_turns: int) -> list[dict[str, str]]:
    """A system prompt, questions and answers, and a question."""
    turns = [SYSTEM]
    for turn in range(num_turns):
        turns += [{"role": "user", "content": f"What is {turn}?"}, {"role": "assistant", "content": f"It is {turn}."}]
    return turns[:-1]


def test_a_template_writes_the_chat() -> None:
    tools = [{"name": "größe"}]
    assert template(MARKED).render(chat(2), tools=tools) == (
        '~<tools>{"name": "größe"}</tools><system>Answer in one word.</system><user>What is 0?</user><a>It is 0.</a>'
        "<user>What is 1?</user><a>"
    )
    assert template(MARKED).render(chat(1), add_generation_prompt=False).endswith("</user>")
    assert template(ALTERNATING).render(chat(2)) == "[Answer in one word.](What is 0?)(It is 0.)(What is 1?)"
    assert len(template("{{ strftime_now('%Y') }}").render(chat(1))) == 4
    assert template("{{ enable_thinking }}").render(chat(1), enable_thinking=False) == "False"
    by_name = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert (by_name.render(chat(1)), by_name.render(chat(1), tools=tools)) == ("plain", "tools")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='user') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
        "{{ raise_exception('no') }}",
        "{{ missing.content }}",
        "{{ 1 / 0 }}",
        "{% if %}",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_refused(source: str) -> None:
    messages = chat(1)
    with pytest.raises(ValueError, match="chat template"):
        template(source).render(messages)
    assert messages == chat(1)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("num_turns", [1, 2, 5, 12])
def test_checkpoints_are_where_other_chats_part(name: str, num_turns: int) -> None:
    """Of chats that go on otherwise from a turn on, all begin with the tokens up to its checkpoint, and no more."""
    model, messages = model_of(TEMPLATES[name]), chat(num_turns)
    prompt = chat_prompt(model, messages)
    assert model.tokenizer is not None
    assert model.tokenizer.decode(prompt.token_ids) == template(TEMPLATES[name]).render(messages)
    turns = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if len(turns) > FIRST_TURNS + LAST_TURNS:
        turns = turns[:FIRST_TURNS] + turns[-LAST_TURNS:]
    starts = []
    for turn in turns:
        others = [
            chat_prompt(model, [*messages[:turn], {"role": "user", "content": content}]).token_ids
            for content in ("How?", "why", "What then?", "{}")
        ]
        common = min(
            next(i for i, (a, b) in enumerate(zip(prompt.token_ids, other, strict=False)) if a != b) for other in others
        )
        starts.append(common)
    assert prompt.checkpoints == tuple(starts)


def test_no_token_crosses_a_checkpoint() -> None:
    """Tokens that end behind the place where others part are not counted."""
    model = model_of(ALTERNATING)
    prompt = chat_prompt(model, [{"role": "user", "content": "é"}])
    assert prompt.checkpoints == (len("[none]("),)


def test_a_chat_whose_turns_cannot_change_has_no_checkpoint() -> None:
    source = "{% if messages[0].content != 'a' %}{{ raise_exception('no') }}{% endif %}x{{ messages[0].content }}"
    assert chat_prompt(model_of(source), [{"role": "user", "content": "a"}]).checkpoints == ()


def test_the_second_chat_hits_what_both_have() -> None:
    engine = LLMEngine(model_of(MARKED), CONFIG, like=compiled())
    tokens = []
    for content in ("One?", "Two?"):
        request_id = engine.add_chat([SYSTEM, {"role": "user", "content": content}], SamplingParams(max_tokens=2))
        tokens.append(drain(engine)[request_id].stats.num_cached_tokens)
    shared = len("~<system>Answer in one word.</system><user>")
    assert tokens == [0, shared // 4 * 4]


MESSAGES = [SYSTEM, {"role": "user", "content": "One?"}]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


def test_a_chat_streams_what_its_tokens_give() -> None:
    model = model_of(MARKED)

    async def answer() -> list[int]:
        async with AsyncLLMEngine(LLMEngine(model, CONFIG, like=compiled())) as engine:
            return [token async for output in engine.chat(MESSAGES, GREEDY) for token in output.token_ids]

    engine = LLMEngine(model, CONFIG, like=compiled())
    request_id = engine.add_request(chat_prompt(model, MESSAGES).token_ids, GREEDY)
    expected = drain(engine)[request_id].output_token_ids.tolist()
    assert asyncio.run(answer()) == expected


def test_the_command_line_takes_chats(tmp_path: Path) -> None:
    folder, file, out = (tmp_path / name for name in ("model", "chats.jsonl", "out.json"))
    shutil.copytree(demo_model_path(), folder)
    (folder / "chat_template.jinja").write_text(MARKED)
    file.write_text(json.dumps({"messages": MESSAGES, "name": "chat"}))
    given = ["--prompts", str(file), "--max-tokens", "2", "-q", "--json", str(out)]
    assert main(["generate", "--model", str(folder), *given]) == 0
    (told,) = json.loads(out.read_text())["requests"]
    assert told["num_prompt_tokens"] == len(chat_prompt(load_model(folder), MESSAGES).token_ids)


@pytest.mark.parametrize("messages", [[], ["hello"], [None], [SYSTEM, "hello"]])
def test_bad_chats_are_refused(messages: Any) -> None:
    with pytest.raises(ValueError, match="expected messages as one or more mappings of role and content"):
        chat_prompt(model_of(MARKED), messages)
    with pytest.raises(ValueError, match="expected a model with a chat template"):
        chat_prompt(model_of(None), chat(1))
    alone = dataclasses.replace(model_of(MARKED), tokenizer=None)
    with pytest.raises(ValueError, match="expected token ids, got a chat"):
        chat_prompt(alone, chat(1))


def test_templates_come_from_a_folder(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "{{ bos_token }}{{ eos_token }}", "bos_token": {"content": "<s>"}}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "other", "eos_token": "</s>"}))
    found = ChatTemplate.from_folder(tmp_path)
    assert found is not None
    assert found.render(chat(1)) == "<s></s>"
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    config.write_text(json.dumps({"chat_template": named}))
    found = ChatTemplate.from_folder(tmp_path)
    assert found is not None
    assert found.render(chat(1), tools=[{}]) == "b"
    (tmp_path / "chat_template.jinja").write_text("alone")
    found = ChatTemplate.from_folder(tmp_path)
    assert found is not None
    assert found.render(chat(1), tools=[{}]) == "alone"


@pytest.mark.parametrize(
    "written",
    [
        "{",
        "[]",
        '{"chat_template": [1]}',
        '{"chat_template": [{"name": "default"}]}',
        '{"chat_template": [{"name": "x", "template": "y"}]}',
        "\udcff",
    ],
)
def test_folders_that_cannot_be_read_are_refused(tmp_path: Path, written: str) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(written.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError):
        ChatTemplate.from_folder(tmp_path)

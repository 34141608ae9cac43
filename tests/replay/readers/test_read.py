"""Any trace file: its form is found by its look, plain or gzipped, and nothing else is taken for one."""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvjax.errors import TraceError
from kvjax.replay import TraceRequest, read_trace
from tests.replay.readers.forms import FORMS, mooncake, sharegpt
from tests.replay.readers.laws import check_trace, read

NAMES = {
    "mooncake": "request lines (Mooncake, Qwen-Bailian)",
    "qwen_bailian": "request lines (Mooncake, Qwen-Bailian)",
    "lengths_alone": "request lines (Mooncake, Qwen-Bailian)",
    "azure_2023": "Azure's LLM inference table",
    "azure_2024": "Azure's LLM inference table",
    "burstgpt": "BurstGPT's table",
    "burstgpt_sessions": "BurstGPT's table",
    "sharegpt": "conversations (ShareGPT, chat messages)",
    "chat_messages": "conversations (ShareGPT, chat messages)",
    "prompts": "prompts (vLLM's bench)",
    "agents": "sessions of agents",
}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_recognised_and_read(name: str, seed: int, tmp_path: Path) -> None:
    text = FORMS[name](np.random.default_rng(seed))
    requests, told = read(tmp_path / "t", text)
    assert told.startswith(f"{tmp_path / 't'}: {NAMES[name]}, {len(requests)} request")
    assert "\n" not in told
    check_trace(requests)
    first = read_trace(tmp_path / "t", 3)
    assert list(map(lengths, first)) == list(map(lengths, requests[:3]))


def lengths(request: TraceRequest) -> tuple[int, int, int]:
    return request.timestamp_ms, request.input_length, request.output_length


@pytest.mark.parametrize("name", FORMS)
def test_how_a_file_is_stored_changes_nothing(name: str, tmp_path: Path) -> None:
    """Gzipped under any name, with a byte order mark, line ends of Windows, blank lines around."""
    text = FORMS[name](np.random.default_rng(0))
    requests, _ = read(tmp_path / "t", text)
    assert read(tmp_path / "t.gz", gzip.compress(text.encode()))[0] == requests
    assert read(tmp_path / "other", gzip.compress(text.encode()))[0] == requests
    assert read(tmp_path / "t", text.encode("utf-8-sig"))[0] == requests
    assert read(tmp_path / "t", text.replace("\r\n", "\n").replace("\n", "\r\n"))[0] == requests
    assert read(tmp_path / "t", "\n \n" + text + "\n\n")[0] == requests
    if not text.startswith(("{", "[")):
        head, _, rest = text.partition("\n")
        assert read(tmp_path / "t", head.upper() + "\n" + rest)[0] == requests
        assert read(tmp_path / "t", head.lower().replace(",", " , ") + "\n" + rest)[0] == requests


def test_lines_of_a_form_may_be_a_json_list(tmp_path: Path) -> None:
    for name in ("mooncake", "prompts", "agents", "chat_messages"):
        lines = FORMS[name](np.random.default_rng(1))
        requests, _ = read(tmp_path / "t", lines)
        assert read(tmp_path / "t", "[" + ",\n".join(lines.splitlines()) + "]")[0] == requests


@pytest.mark.parametrize(
    "text",
    [
        "hello",
        "a,b,c\n1,2,3\n",
        '{"time": 1, "tokens": 2}',
        "version https://git-lfs.github.com/spec/v1\n",
        "PAR1\x15\x04",
    ],
)
def test_an_unknown_form_is_told_what_is_known_and_how_to_convert(text: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="t: expected a trace of a known form, got") as error:
        read(tmp_path / "t", text)
    for part in (
        'write a line {"timestamp": milliseconds, "input_length": tokens}',
        *set(NAMES.values()),
        "TIMESTAMP,",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize("text", ["", " \n\n", "[]", "\ufeff", "TIMESTAMP,ContextTokens,GeneratedTokens\n"])
def test_a_file_without_a_request_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"t: expected at least one request, got none"):
        read(tmp_path / "t", text)


@pytest.mark.parametrize(
    ("form", "option", "message"),
    [
        ("mooncake", {"users": 3}, "expected no users for request lines .*, got 3; leave it out"),
        ("azure_2023", {"hash_block_size": 16}, "expected no hash_block_size for Azure's LLM inference table, got 16"),
        ("burstgpt", {"time_unit": "ms"}, "expected no time_unit for BurstGPT's table, got ms"),
        ("agents", {"time_unit": "s"}, "expected no time_unit for sessions of agents, got s"),
        ("sharegpt", {"hash_block_size": 16}, "expected no hash_block_size for conversations"),
    ],
)
def test_options_of_other_forms_are_refused(form: str, option: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=message):
        read(tmp_path / "t", FORMS[form](np.random.default_rng(0)), **option)


@pytest.mark.skipif(not Path("/dev/fd").is_dir(), reason="no pipes with names here")
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_pipe_is_read_whole(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """As a shell's `<(zcat trace.gz)` is: it can be opened and read once."""
    text = mooncake(np.random.default_rng(0))
    reader, writer = os.pipe()
    os.write(writer, pack(text.encode()))
    os.close(writer)
    assert read_trace(f"/dev/fd/{reader}") == read(tmp_path / "t", text)[0]
    os.close(reader)


@pytest.mark.parametrize("keep", [5, 20, -9, -1])
def test_cut_gzip_data_is_refused(keep: int, tmp_path: Path) -> None:
    whole = gzip.compress(mooncake(np.random.default_rng(0)).encode())
    with pytest.raises(TraceError, match=r"t.gz: expected whole gzip data, got .*; copy the file again"):
        read(tmp_path / "t.gz", whole[:keep])


def test_plain_text_under_a_gzip_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"t.gz: expected gzip data, got b'\{\"'; give plain text a name without .gz"):
        read(tmp_path / "t.gz", mooncake(np.random.default_rng(0)))


def test_text_that_is_not_utf_8_is_refused_with_its_line(tmp_path: Path) -> None:
    lines = mooncake(np.random.default_rng(0)).encode().splitlines(keepends=True)
    with pytest.raises(TraceError, match=r"t:3: expected UTF-8 text, got b'\\xff.*'; convert it, as with iconv"):
        read(tmp_path / "t", b"".join([*lines[:2], b"\xff\xfe\x00\n", *lines[2:]]))
    with pytest.raises(TraceError, match=r"t:1: expected UTF-8 text, got b'\\xff\\xfe"):
        read(tmp_path / "t", sharegpt(np.random.default_rng(0)).encode("utf-16"))
    with pytest.raises(TraceError, match=r"t:13: expected UTF-8 text, got b'\\xe6'"):
        read(tmp_path / "t", b"".join(lines) + "漢".encode()[:1])


def test_objects_inside_a_list_are_named_by_their_place(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="t: item 1: expected a JSON object, got int"):
        read(tmp_path / "t", '[{"prompt": "a"}, 5]')


SHORT, LONG = pytest.param(range(40), id="short"), pytest.param(range(40, 1_040), id="long", marks=pytest.mark.sweep)


@pytest.mark.parametrize("seeds", [SHORT, LONG])
@pytest.mark.parametrize("name", FORMS)
def test_damaged_files_are_read_as_traces_or_refused(name: str, seeds: range, tmp_path: Path) -> None:
    """Whatever was done to a file: requests that hold the laws, or a TraceError that names the file."""
    refusals = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        text = FORMS[name](rng)
        for _ in range(rng.integers(1, 4)):
            text = damaged(text, rng)
        try:
            check_trace(read(tmp_path / "t", text.encode("utf-8", "surrogatepass"))[0])
        except TraceError as error:
            refusals.append(str(error))
    assert 0 < len(refusals) < len(seeds)
    assert [refusal for refusal in refusals if not refusal.startswith(str(tmp_path / "t"))] == []


VALUES = "-1 0 1e400 NaN Infinity 1.5 999999999999999999999999999999 null true '7' [] {} 1e9".replace("'", '"').split()


def damaged(text: str, rng: np.random.Generator) -> str:
    """One change of a file: of a character, a number, a key, a line, a stretch, or its end."""
    spans = [match.span() for match in re.finditer(r"-?\d+(\.\d+)?|\"\w*\"|\[[^][]*\]", text)] or [(0, 0)]
    start, end = spans[rng.integers(len(spans))]
    lines = text.splitlines(keepends=True) or [""]
    a, b = rng.integers(len(lines), size=2)
    at = int(rng.integers(len(text) + 1))
    changes = [
        lambda: text[:start] + str(rng.choice(VALUES)) + text[end:],
        lambda: text[:start] + "9" * 5_000 + text[end:],
        lambda: text[:start] + text[end:],
        lambda: text[:at] + chr(rng.integers(1, 300)) + text[at + 1 :],
        lambda: text[:at],
        lambda: text[:at] + text[at + int(rng.integers(40)) :],
        lambda: "".join([*lines[:a], lines[b], *lines[a:]]),
        lambda: "".join(line for i, line in enumerate(lines) if i != a),
        lambda: text[:at] + "\x00\ud800"[rng.integers(2)] + text[at:],
    ]
    return changes[rng.integers(len(changes))]()

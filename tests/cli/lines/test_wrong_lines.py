"""Wrong command lines of newcomers: one line says what was expected and what came, without a traceback."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from kvjax.cli.main import main

FORMS = re.compile(r"expected|needs|did you mean|required|unrecognized|not allowed")
REQUEST = '{"timestamp": 0, "input_length": %s, "output_length": 1}\n'
LINES = (
    # Commands and options that are not there, or not so.
    ("pln qwen3-8b", "did you mean plan?"),
    ("plna", "did you mean plan?"),
    ("genrate hello", "did you mean generate?"),
    ("Plan qwen3-8b", "did you mean plan?"),
    ("--memory 8GiB", "argument COMMAND: expected one of plan, replay, "),
    ("help pln", "did you mean plan?"),
    ("plan qwen3-8b --memroy 8GiB", "did you mean --memory?"),
    ("plan qwen3-8b -memory 8GiB", "did you mean --memory?"),
    ("plan qwen3-8b --max-len 4k --memory 8GiB", "unrecognized arguments: --max-len"),
    ("plan qwen3-8b 8GiB", "unrecognized arguments: 8GiB"),
    ("generate --max-token 4", "did you mean --max-tokens?"),
    ("replay --generate chats", "got 'chats'; did you mean chat?"),
    ("replay --generate chat --policy LRU", "did you mean lru?"),
    ("completion bsh", "did you mean bash?"),
    ("launch -n 2", "PROGRAM"),
    # Names of models, deployments and files that are not there.
    ("plan '' --memory 8GiB", "expected a model's name"),
    ("replay trace.jsonl --compare-defaults llama-3-8b,,qwen3-8b", "expected a model's name"),
    ("plan qwen3-8B --memory 8GiB", "did you mean qwen3-8b?"),
    ("plan llama3-8b --memory 8GiB", "did you mean llama-3-8b?"),
    ("plan Qwen/Qwen3-8B --memory 8GiB", "expected a model's name"),
    ("plan --deployment qwen3-8b-h10", "did you mean qwen3-8b-h100?"),
    ("replay nowhere.jsonl", "expected a file that exists, got 'nowhere.jsonl'"),
    ("replay trace.json", "expected a file that exists, got 'trace.json'; did you mean trace.jsonl?"),
    ("replay nowhere/trace.jsonl", "expected a file that exists, got 'nowhere/trace.jsonl'"),
    ("replay --calls nowhere", "expected a file that exists, got 'nowhere'"),
    ("replay trace.jsonl --tokenizer nowhere", "expected --tokenizer FOLDER with a tokenizer.json, got none"),
    ("generate --model nowhere", "expected a Hugging Face"),
    ("generate --prompts nowhere.txt", "expected a file that exists, got 'nowhere.txt'"),
    ("generate --draft-model nowhere", "expected --speculative draft-model with --draft-model"),
    ("generate --shared-cache @nowhere", "expected a file that exists, got 'nowhere'"),
    ("bench --model nowhere", "expected a Hugging Face"),
    ("bench --hf-python nowhere", "nowhere"),
    ("launch -- nowhere", "expected a file that exists, got 'nowhere'"),
    # Folders for files, and files for folders.
    ("plan folder --memory 8GiB", "expected a Hugging Face model folder with config.json"),
    ("replay folder", "expected a file, got the folder 'folder'"),
    ("generate --prompts folder", "expected a file, got the folder 'folder'"),
    ("plan qwen3-8b --memory 8GiB --json folder", "expected a file to write, got the folder 'folder'"),
    ("plan qwen3-8b --memory 8GiB --json nowhere/x", "expected a file in a folder that exists, got 'nowhere/x'"),
    ("plan qwen3-8b --memory 8GiB --json ''", "expected a file's name, got ''"),
    ("generate --model trace.jsonl", "expected a Hugging Face"),
    ("generate --disk-cache empty", "expected a folder, got the file 'empty'"),
    # Empty, binary and damaged files.
    ("replay empty", "expected at least one request, got none"),
    ("replay blank", "expected at least one request, got none"),
    ("replay binary", "expected UTF-8 text, got"),
    ("replay cut.gz", "expected whole gzip data"),
    ("replay plain.gz", "expected gzip data, got"),
    ("replay text", "expected a trace of a known form"),
    ("replay negative.jsonl", "expected"),
    ("replay nan.jsonl", "expected"),
    ("replay --calls trace.jsonl", "expected a file of recorded calls, got another"),
    ("plan empty --memory 8GiB", "expected JSON"),
    ("plan binary --memory 8GiB", "expected"),
    ("plan trace.jsonl --memory 8GiB", "expected"),
    ("plan --deployment text", "expected TOML"),
    ("generate --prompts empty", "expected at least one prompt in empty, got none"),
    ("generate --prompts binary", "expected UTF-8"),
    ("generate --prompts bad.jsonl", "bad.jsonl:1: expected JSON"),
    # Numbers.
    ("plan qwen3-8b --memory=-8GiB", "expected a size"),
    ("plan qwen3-8b --memory 8GX", "expected a size"),
    ("plan qwen3-8b --memory nan", "expected a size"),
    ("plan qwen3-8b --memory 0", "expected a size of at least 1 byte, got '0'"),
    ("plan qwen3-8b --memory 1KB", "memory"),
    ("plan qwen3-8b --num-blocks -5", "expected an integer >= 1, got '-5'"),
    ("plan qwen3-8b --num-blocks 1", "expected num_blocks >= 2 (block 0 is the null block), got 1"),
    ("plan qwen3-8b --memory 8GiB --max-model-len long", "expected auto or an integer >= 1, got 'long'"),
    ("replay trace.jsonl --retention-interval some", "expected auto, all or an integer >= 0, got 'some'"),
    ("replay trace.jsonl --prefill-tokens-per-s 0", "expected a number > 0, got '0'"),
    ("bench --new-tokens 1", "expected --new-tokens of at least 2, got 1"),
    ("bench --shared-len 999", "expected --shared-len below the 256 of --prompt-len, got 999"),
    ("plan qwen3-8b --memory 8GiB --lengths 1k,,2k", "expected an integer >= 1, got ''"),
    ("plan qwen3-8b --memory 8GiB --tensor-parallel 3", "expected"),
    ("plan qwen3-8b", "expected --memory or --num-blocks, got none"),
    ("plan --memory 8GiB", "expected a MODEL or a deployment"),
    ("replay trace.jsonl --num-blocks 1", "expected num_blocks >= 2 (block 0 is the null block), got 1"),
    ("replay trace.jsonl --num-requests 0", "expected an integer >= 1, got '0'"),
    ("replay trace.jsonl --host-gb-per-s nan", "expected a number > 0, got 'nan'"),
    ("replay trace.jsonl --step-overhead-ms inf", "expected a number >= 0, got 'inf'"),
    ("replay trace.jsonl --seed 1.5", "--seed: expected an integer"),
    ("replay --generate chat --seed -1", "expected"),
    ("generate --temperature nan", "expected a number >= 0, got 'nan'"),
    ("generate --top-p two", "--top-p: expected a number"),
    ("generate --top-p 2", "expected top_p"),
    ("generate --top-k 1.5", "--top-k: expected an integer"),
    ("generate --max-tokens 0", "expected an integer >= 1, got '0'"),
    ("generate --sink-tokens -1", "expected an integer >= 0, got '-1'"),
    ("generate --n 2", "expected --temperature above 0 with --n 2, got 0"),
    ('generate ""', "expected text in prompt prompt-1, got none"),
    ("launch --restarts -1 -- true", "expected an integer >= 0, got '-1'"),
    ("check --hang 0", "expected a number > 0, got '0'"),
    # What does not go together.
    ("replay trace.jsonl --generate chat", "expected a TRACE or --generate"),
    ("replay trace.jsonl --memory 1GiB --num-blocks 9", "not allowed with argument --memory"),
    ("replay trace.jsonl --plot out.gif", "expected a file that ends in .png, .pdf, .svg, got 'out.gif'"),
    ("replay trace.jsonl --json trace.jsonl", "expected --json with a file that is not read"),
    ("replay trace.jsonl --router prefix", "expected --replicas N"),
    ("generate hello --num-drafts 3", "expected --speculative with --num-drafts 3, got none"),
    ("generate hello --keep-prompt", "expected --window"),
)


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a newcomer's folder may have."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    contents = {
        "empty": b"",
        "blank": b"\n \n",
        "binary": bytes(range(128, 256)) * 9,
        "text": b"Dear cache, = [\n",
        "cut.gz": bytes.fromhex("1f8b080000000000"),
        "plain.gz": b"plain\n",
        "bad.jsonl": b"{not json\n",
        "trace.jsonl": (REQUEST % 40).encode(),
        "negative.jsonl": (REQUEST % -5).encode(),
        "nan.jsonl": (REQUEST % "NaN").encode(),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)


@pytest.mark.parametrize(("line", "message"), LINES, ids=[line for line, _ in LINES])
def test_a_wrong_line_is_answered_in_one(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With status 2."""
    try:
        status: object = main(shlex.split(line))
    except SystemExit as ended:
        status = ended.code
    out, err = capsys.readouterr()
    assert status == 2, (status, out, err)
    told = [one for one in err.splitlines() if not one.startswith("kvjax: warning")]
    assert len(told) == 1, err
    assert message in told[0], told[0]
    assert FORMS.search(told[0]), told[0]
    assert len(told[0]) < 1_500


def test_a_file_that_may_not_be_opened_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(args: object) -> int:
        raise PermissionError(13, "Permission denied", "secret.jsonl")

    monkeypatch.setattr("kvjax.cli.commands.replay.run", refuse)
    assert main(["replay", "secret.jsonl"]) == 2
    assert "expected a file that this user may open, got 'secret.jsonl'; see who owns it" in capsys.readouterr().err


@pytest.mark.filterwarnings("always")
def test_a_prompt_that_is_a_files_name_is_pointed_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "text", "--n", "2"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "kvjax: warning: the prompt 'text' names a file; --prompts text reads prompts from it"
    assert len(told) == 2

"""`kvjax generate` on the demo model: text, tables, picture, JSON and PNG; every refusal in one line."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import pytest

from kvjax.cli.commands.generate import _about, _engine_config, _make_engine, add_arguments
from kvjax.cli.generate.prompts import NamedPrompt, read_prompts, samples_of
from kvjax.cli.generate.report import totals_lines
from kvjax.cli.generate.stream import OrderedTextPrinter, prompt_tail
from kvjax.cli.main import main
from kvjax.demo import demo_model_path, demo_requests
from kvjax.engine import LLMEngine, SamplingParams
from kvjax.errors import ConfigError, NeverHitsWarning
from kvjax.models import load_model
from tests.cli.interrupting import interrupting_after
from tests.models.golden_models import model_folder

CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
SMALL = [
    "--num-blocks",
    "200",
    "--max-num-seqs",
    "2",
    "--max-num-batched-tokens",
    "32",
    "--max-tokens",
    "4",
    "--max-model-len",
    "288",
]


def test_the_demo_prints_text_hits_and_the_pool(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot, report = tmp_path / "pool.png", tmp_path / "report.json"
    assert main(["generate", *SMALL, "--plot", str(plot), "--json", str(report)]) == 0
    out = capsys.readouterr().out
    requests = demo_requests()
    assert all(f"--- {request.name} -" in out for request in requests)
    assert "█ held  ▒ cached  · free" in out
    assert "prompt tokens were found" in out
    assert "Sliding windows gave" in out
    assert f"Plot written to {plot}" in out
    assert plot.read_bytes().startswith(b"\x89PNG")
    data = json.loads(report.read_text())
    assert [request["name"] for request in data["requests"]] == [request.name for request in requests]
    assert data["totals"]["hit_tokens"] == sum(request["num_cached_tokens"] for request in data["requests"]) > 500
    assert data["totals"]["computed_tokens"] == sum(step["num_new_tokens"] for step in data["steps"])
    assert data["totals"]["preemptions"] == 0
    tokenizer = load_model(demo_model_path()).tokenizer
    assert tokenizer is not None
    for prompt, request in zip(requests, data["requests"], strict=True):
        ids = tokenizer.encode(prompt.prompt)
        assert tokenizer.decode(ids) + request["text"] == tokenizer.decode(ids + request["output_token_ids"])
        assert prompt.prompt[-7:] + request["text"] + "\n\n" in out


def test_prompts_of_a_file_and_of_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("A list is\n\nA dict is\n")
    arguments = ["--prompt", "A tuple is", "--prompts", str(file), "--no-prefix-caching", "--async"]
    assert main(["generate", *SMALL, *arguments, "--temperature", "0.8", "--top-p", "0.9"]) == 0
    out = capsys.readouterr().out
    assert [name for name in ("prompt-1", "line-1", "line-3") if f"--- {name}" in out] == [
        "prompt-1",
        "line-1",
        "line-3",
    ]
    assert "prefix caching off" in out
    assert "Plot" not in out


def test_samples_of_a_prompt_share_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Two run at once: of the first prompt the second sample shares the blocks, the third finds them cached."""
    report = tmp_path / "report.json"
    prompts = [request.prompt for request in demo_requests()[:2]]
    texts = [argument for prompt in prompts for argument in ("--prompt", prompt)]
    assert main(["generate", *SMALL, *texts, "--n", "3", "--temperature", "5", "--json", str(report)]) == 0
    out, data = capsys.readouterr().out, json.loads(report.read_text())
    names = ["prompt-1", "prompt-1.1", "prompt-1.2", "prompt-2", "prompt-2.1", "prompt-2.2"]
    assert [request["name"] for request in data["requests"]] == names
    assert "6 requests, 2 at once" in out
    assert all(f"--- {name} -" in out for name in names)
    sizes, shared = ([request[f"num_{what}_tokens"] for request in data["requests"]] for what in ("prompt", "shared"))
    assert shared[:3] == [0, sizes[0] - 1, 0]
    sums = data["totals"]
    assert f"Further samples of a prompt shared {sum(shared):,} prompt tokens with the first." in out
    assert sums["shared_tokens"] == sum(shared)
    assert sums["queried_tokens"] == sum(size for size, count in zip(sizes, shared, strict=True) if not count)
    assert f"{sums['hit_tokens']:,} of {sums['queried_tokens']:,} prompt tokens were found" in out
    assert sums["hit_tokens"] == sum(step["num_hit_tokens"] for step in data["steps"]) > sizes[0] // 2
    assert sums["computed_tokens"] == sum(step["num_new_tokens"] for step in data["steps"])
    assert (sums["refound_tokens"], sums["recomputed_tokens"], sums["preemptions"]) == (0, 0, 0)
    assert all(pool["released"] >= 0 for step in data["steps"] for pool in step["pools"])
    assert len({tuple(request["output_token_ids"]) for request in data["requests"][:3]}) > 1


def test_hits_inside_blocks_misses_and_the_policy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    prompt = demo_requests()[0].prompt
    arguments = [
        "--prompt",
        prompt,
        "--prompt",
        prompt[:-20],
        "--max-num-seqs",
        "1",
        "--policy",
        "slru",
        "-q",
    ]
    assert main(["generate", *SMALL, *arguments, "--sub-block-hits", "--miss-reasons", "--json", str(report)]) == 0
    out, data = capsys.readouterr().out, json.loads(report.read_text())
    assert "prefix caching on, also inside blocks, slru eviction" in out
    assert (data["config"]["eviction_policy"], data["config"]["sub_block_hits"]) == ("slru", True)
    assert main(["generate", *SMALL, *arguments, "--rules", "vllm-0.33.0"]) == 2
    assert "expected --rules vllm-0.33.0 or --policy, got both" in capsys.readouterr().err
    first, second = data["requests"]
    assert second["num_cached_tokens"] == second["num_prompt_tokens"] - 1 > 16
    assert second["num_cached_tokens"] % 16
    sums = data["totals"]
    assert sum(sums["missed_tokens"].values()) + sums["hit_tokens"] == sums["prompt_tokens"] == sums["queried_tokens"]
    assert first["num_missed_tokens"]["never_seen"] == sums["missed_tokens"]["never_seen"]
    lines = [line.split() for line in out.splitlines()]
    assert ["found", str(sums["hit_tokens"]), f"{sums['token_hit_rate']:.2%}"] in lines
    assert any(line[:2] == ["never", "seen"] for line in lines)


@pytest.mark.parametrize("mode", [[], ["--async"]], ids=["sync", "async"])
def test_an_interrupted_run_reports_what_there_is(
    mode: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests at once, interrupted when the short one has ended: the long one runs, the third waits."""
    report = tmp_path / "report.json"
    prompts = ("A list is", demo_requests()[0].prompt, "A tuple is")
    texts = [argument for prompt in prompts for argument in ("--prompt", prompt)]
    argv = ["generate", *SMALL, *texts, *mode, "--ignore-eos", "--json", str(report)]
    assert main(argv) == 0
    whole = json.loads(report.read_text())
    assert not whole["interrupted"]
    capsys.readouterr()
    monkeypatch.setattr("kvjax.cli.commands.generate.progress", interrupting_after(1, "Generating"))
    assert main(argv) == 130
    captured, data = capsys.readouterr(), json.loads(report.read_text())
    assert captured.err == "kvjax: interrupted\n"
    assert "interrupted after 1 of 3 requests" in captured.out
    assert data["interrupted"]
    for found, expected in zip(data["requests"], whole["requests"], strict=True):
        tokens = found["output_token_ids"]
        assert tokens == expected["output_token_ids"][: len(tokens)]
        assert found["text"] in captured.out
        assert (found["finish_reason"] == "abort") == (len(tokens) < 4)
    assert [request["num_output_tokens"] < 4 for request in data["requests"]] == [False, True, True]
    assert [request["num_cached_tokens"] is None for request in data["requests"]] == [False, False, True]
    sums = data["totals"]
    assert sums["queried_tokens"] == sum(request["num_prompt_tokens"] for request in data["requests"][:2])
    assert sums["computed_tokens"] == sum(step["num_new_tokens"] for step in data["steps"])


def test_samples_are_called_differently_from_prompts() -> None:
    prompts = [NamedPrompt("a", "x"), NamedPrompt("a.1", "y")]
    assert samples_of(prompts, 1) == prompts
    assert [sample.name for sample in samples_of(prompts[:1], 3)] == ["a", "a.1", "a.2"]
    with pytest.raises(ValueError, match=r"expected samples of different names, got a\.1 more than once"):
        samples_of(prompts, 2)


def test_the_default_pool_holds_a_request_at_its_longest() -> None:
    """With the blocks of tokens in flight."""
    arguments = ["--max-num-seqs", "1", "--max-num-batched-tokens", "256", "--max-tokens", "100"]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(arguments)
    model = load_model(demo_model_path())
    engine = LLMEngine(model, _engine_config(args, model, 400))
    engine.check_request([5] * 300, SamplingParams(max_tokens=100))


def test_blocks_are_as_long_as_the_model_wants_them() -> None:
    """DeepSeek V4's hold whole entries of 128 tokens, so they are not those of most models."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    model = load_model(model_folder("deepseek_v4"))
    assert _engine_config(parser.parse_args([]), model, 300).block_size == 256
    assert _engine_config(parser.parse_args(["--block-size", "128"]), model, 300).block_size == 128
    args = parser.parse_args([])
    engine = LLMEngine(model, _engine_config(args, model, 300))
    pools = [line for line in _about(engine, args, 1) if line.startswith("Pool")]
    assert [re.findall("blocks of (.*) tokens", line) for line in pools] == [["64 or 256"], ["4"], ["8"]]


def test_preemptions_are_told() -> None:
    sums = {
        "requests": 1,
        "wall_s": 1.0,
        "steps": 2,
        "output_tokens": 3,
        "output_tokens_per_s": 3.0,
        "host_us_per_step": 12.0,
        "host_us_per_step_median": 9.0,
        "hit_tokens": 0,
        "prompt_tokens": 8,
        "queried_tokens": 8,
        "shared_tokens": 0,
        "draft_tokens": 0,
        "token_hit_rate": 0.0,
        "released_blocks": 0,
        "preemptions": 1,
        "recomputed_tokens": 5,
        "refound_tokens": 16,
    }
    lines = totals_lines(sums)
    assert lines[0].startswith("1 request in 1.0 s and 2 steps: 3 tokens written")
    assert lines[-1] == (
        "Blocks ran out: 1 preemption, after which 16 tokens were still cached and 5 had to be computed again."
    )


def test_generate_and_plan_agree_on_bytes(tmp_path: Path) -> None:
    """Both take the checkpoint's dtype; generate told of another one needs that one's bytes."""
    size = ["--num-blocks", "200", "--max-model-len", "288", "--block-size", "16"]
    folder, path = str(demo_model_path()), tmp_path / "plan.json"

    def planned(*arguments: str) -> int:
        assert main(["plan", folder, *size, "--platform", "cpu", "--json", str(path), *arguments]) == 0
        return sum(pool["total_bytes"] for pool in json.loads(path.read_text(encoding="utf-8"))["pools"])

    def generated(*arguments: str) -> int:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        args = parser.parse_args([*size, *arguments])
        model = load_model(demo_model_path(), args.dtype)
        return LLMEngine(model, _engine_config(args, model, 288))._runner.pages.num_bytes

    assert generated() == planned() == planned("--dtype", "bfloat16")
    assert generated("--dtype", "float32") == planned("--dtype", "float32") == 2 * planned()


def test_quiet_runs_print_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *SMALL, "--prompt", "A tuple is", "-q"]) == 0
    out = capsys.readouterr().out
    assert "A tuple is" not in out
    assert "prompt-1" in out


def test_jsonl_prompts_have_lines_and_names(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\\nb", "name": "first"}\n\n"plain"\n')
    assert [(prompt.name, prompt.text) for prompt in read_prompts(None, file)] == [
        ("first", "a\nb"),
        ("line-3", "plain"),
    ]
    file.write_text('{"prompt_token_ids": [3, 1], "inputs": "a.npz"}\n')
    assert read_prompts(None, file) == [NamedPrompt("line-1", "3 1 ", (3, 1), inputs=tmp_path / "a.npz")]
    chat = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]}
    file.write_text(json.dumps(chat) + "\n" + json.dumps({**chat, "tools": [{"name": "t"}], "name": "tools"}) + "\n")
    assert read_prompts(None, file) == [
        NamedPrompt("line-1", "q", chat={**chat, "tools": None}),
        NamedPrompt("tools", "q", chat={**chat, "tools": [{"name": "t"}]}),
    ]
    file.write_text('"one\u2028line"\n', encoding="utf-8-sig")
    assert [prompt.text for prompt in read_prompts(None, file)] == ["one\u2028line"]


def test_prompt_files_are_utf8(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"prompts.txt: expected UTF-8, got"):
        read_prompts(None, file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{not json\n", r"prompts.jsonl:1: expected JSON"),
        ('"a"\n{"text": "b"}\n', r'prompts.jsonl:2: expected a string, or an object with "prompt"'),
        ('{"prompt": "a", "name": "x"}\n{"prompt": "b", "name": "x"}\n', "different names, got x"),
        ('{"prompt": ""}\n', "expected text in prompt line-1"),
        ('{"prompt": "a", "name": null}\n', r'prompts.jsonl:1: expected a string, or an object with "prompt"'),
        ('"\\ud800"\n', "expected Unicode text in prompt line-1"),
        (
            '{"prompt": "a", "prompt_token_ids": [1]}\n',
            r'prompts.jsonl:1: expected a string, or an object with "prompt"',
        ),
        ('{"prompt_token_ids": [1.5]}\n', r"prompts.jsonl:1: expected a string, or an object"),
        ('{"prompt_token_ids": [1], "inputs": 3}\n', r"prompts.jsonl:1: expected a string, or an object"),
        ('{"messages": []}\n', r"prompts.jsonl:1: expected a string, or an object"),
        ('{"messages": ["a"]}\n', r"prompts.jsonl:1: expected a string, or an object"),
        ('{"messages": [{}], "tools": 1}\n', r"prompts.jsonl:1: expected a string, or an object"),
        ('{"messages": [{}], "prompt": "a"}\n', r"prompts.jsonl:1: expected a string, or an object"),
        ('{"prompt": "a", "tools": []}\n', r"prompts.jsonl:1: expected a string, or an object"),
        ('{"messages": [{"role": "\\ud800"}]}\n', "expected Unicode text in prompt line-1"),
        ("\n", "at least one prompt in .*prompts.jsonl"),
    ],
)
def test_bad_prompt_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_prompts(None, file)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "/no/such/file"], "expected a file that exists, got '/no/such/file'"),
        (["--model", "/no/such/folder"], "config.json"),
        (["--top-p", "2"], "top_p in (0, 1], got 2.0"),
        (["--min-p", "-1"], "min_p in [0, 1], got -1.0"),
        (["--stop", ""], "stop strings of at least one character, got ''"),
        (["--max-tokens", "4000"], "max_model_len"),
        (["--prompt", "a", "--max-model-len", "2"], "request prompt-1: expected prompt and max_tokens of at most 2"),
        (["--prompt", "\udcff"], "expected Unicode text in prompt prompt-1, got '\\udcff'"),
        (["--num-blocks", "5"], "blocks short; give more blocks"),
        (["--num-blocks", "1"], "num_blocks >= 2"),
        (["--memory", "1KiB"], "bytes"),
        (["--devices", "64"], "devices"),
        (["--n", "2"], "expected --temperature above 0 with --n 2, got 0: greedy samples are all the same"),
        (["--sub-block-hits", "--no-prefix-caching"], "expected enable_prefix_caching=True with sub_block_hits=True"),
    ],
)
def test_what_cannot_be_is_one_line_on_stderr(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["generate", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvjax generate: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_text_for_a_model_without_a_tokenizer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).parents[2] / "models" / "goldens" / "qwen3"
    assert main(["generate", "--model", str(folder), "--prompt", "A tuple is"]) == 2
    assert "expected prompt_token_ids in a .jsonl file, got the text 'A tuple is'" in capsys.readouterr().err


def test_a_plot_without_matplotlib_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    assert main(["generate", "--plot", "x.png"]) == 2
    assert "pip install 'kvjax[plots]'" in capsys.readouterr().err


def test_text_is_printed_in_the_order_of_the_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = read_prompts(["p", "q", "r"], None)
    printer = OrderedTextPrinter(prompts, sys.stdout)
    printer.push("prompt-2", "5 ")
    assert "5" not in capsys.readouterr().out
    printer.push("prompt-1", "7 ")
    assert capsys.readouterr().out.endswith("7 ")
    printer.end("prompt-3", "8 ")
    printer.end("prompt-1", "7 9 ")
    out = capsys.readouterr().out
    assert out.startswith("9 ")
    assert out.endswith("5 ")
    printer.push("prompt-2", "6 ")
    printer.end("prompt-2", "5 6 ")
    assert "6 \n\n--- prompt-3" in capsys.readouterr().out
    assert printer.texts == {"prompt-1": "7 9 ", "prompt-2": "5 6 ", "prompt-3": "8 "}


def test_text_ends_before_a_stop_string(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ["--prompt", "A tuple is", "--json", str(report), "--max-tokens", "12"]
    assert main(["generate", *SMALL, *arguments]) == 0
    (whole,) = json.loads(report.read_text())["requests"]
    stop = whole["text"][5:8]
    arguments += ["--stop", stop, "--stop", "no such text", "--presence-penalty", "0"]
    assert main(["generate", *SMALL, *arguments]) == 0
    (cut,) = json.loads(report.read_text())["requests"]
    assert cut["text"] == whole["text"].split(stop)[0]
    assert f"A tuple is{cut['text']}\n" in capsys.readouterr().out


def test_long_prompts_show_their_end() -> None:
    assert prompt_tail("short") == "short"
    assert prompt_tail("x" * 300 + "\n\nQuestion: why?\nAnswer:") == "[...] Question: why?\nAnswer:"
    assert prompt_tail("word " * 100).startswith("[...] word")
    assert len(prompt_tail("x" * 1000)) < 300


@pytest.mark.skipif(any(map(importlib.util.find_spec, CUDA_PLUGINS)), reason="jax has a package for CUDA here")
def test_a_platform_that_jax_lacks_is_one_clear_line() -> None:
    environment = os.environ | {"JAX_PLATFORMS": "cuda"}
    command = [sys.executable, "-m", "kvjax", "generate", *SMALL]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "kvjax generate: error: expected JAX_PLATFORMS of a platform that jax can run on here, got 'cuda'; install jax "
        "for it, such as pip install 'kvjax[cuda]', or set JAX_PLATFORMS=cpu\n"
    )


def test_the_assertion_that_jax_fails_is_shown_with_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError

    monkeypatch.setattr(jax, "devices", fail)
    with pytest.raises(ConfigError, match="expected JAX_PLATFORMS of a platform that jax can run on here"):
        main(["generate", *SMALL, "--no-compilation-cache", "--debug"])


@pytest.mark.parametrize(
    ("options", "warns"), [([], False), (["--max-model-len", "16"], True), (["--block-size", "16"], True)]
)
def test_that_nothing_can_hit_is_said_of_sizes_that_were_chosen(options: list[str], warns: bool) -> None:
    """A short prompt's engine has room for one block a request, unless it is told otherwise."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["Hi", "--max-tokens", "2", *options])
    model = load_model(demo_model_path())
    config = _engine_config(args, model, 4)
    assert config.max_model_len == config.block_size
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _make_engine(args, model, config, None, None)
    assert [one.category for one in told] == [NeverHitsWarning] * warns

"""`kvjax generate --model DIR` on the golden model of every family; without `-m sweep` those with further inputs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvjax.cli.generate.prompt_inputs import read_inputs
from kvjax.cli.main import main
from kvjax.engine import EngineConfig, LLMEngine, SamplingParams
from kvjax.models import StreamingWindow
from tests.models.families import FAMILIES, Family, inputs_of
from tests.models.golden_models import Golden, goldens_of, model_folder

QUANTISED = Path(__file__).parents[2] / "models" / "quantised" / "goldens"
WITH_INPUTS = frozenset({"whisper", "qwen3_vl"})


def save_inputs(golden: Golden, file: Path) -> None:
    """As `kvjax.cli.generate.prompt_inputs` reads them."""
    arrays = inputs_of(golden)
    for i, item in enumerate(arrays.pop("embeddings", [])):
        arrays |= {f"embeds_{i}": item.embeds, f"start_{i}": item.start}
    np.savez(file, **arrays)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=family.name, marks=[] if family.name in WITH_INPUTS else [pytest.mark.sweep])
        for family in FAMILIES
    ],
)
def test_tokens_are_those_of_hugging_face(family: Family, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    goldens = goldens_of(family.name)[:3]
    with (tmp_path / "prompts.jsonl").open("w") as lines:
        for i, golden in enumerate(goldens):
            line = {"prompt_token_ids": golden.prompt.tolist(), "name": f"golden-{i}"}
            if golden.extras:
                save_inputs(golden, tmp_path / f"{i}.npz")
                line["inputs"] = f"{i}.npz"
            lines.write(json.dumps(line) + "\n")
    arguments = ["--model", model_folder(family.name), "--prompts", tmp_path / "prompts.jsonl", "--dtype", "float32"]
    arguments += ["--max-tokens", 32, "--temperature", 0, "--block-size", family.block_size, "--max-num-seqs", 4]
    arguments += ["--max-num-batched-tokens", 64, "--json", tmp_path / "report.json"]
    if family.streaming is not None:
        arguments += ["--window", family.streaming.size, "--sink-tokens", family.streaming.num_sink_tokens]
    assert main(["generate", *map(str, arguments)]) == 0, capsys.readouterr().err
    requests = json.loads((tmp_path / "report.json").read_text())["requests"]
    assert [request["output_token_ids"] for request in requests] == [golden.greedy.tolist() for golden in goldens]
    shown = "".join(f"{token} " for token in goldens[0].greedy)
    assert requests[0]["text"] == shown
    assert shown in capsys.readouterr().out


def test_a_window_may_keep_the_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, golden = model_folder("streaming_llm"), goldens_of("streaming_llm")[0]
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt_token_ids": golden.prompt.tolist()}) + "\n")
    arguments = ["--model", folder, "--prompts", tmp_path / "prompts.jsonl", "--dtype", "float32", "--max-tokens", 40]
    arguments += ["--temperature", 0, "--window", 8, "--keep-prompt", "--json", tmp_path / "report.json"]
    arguments += ["--max-num-seqs", 1, "--max-num-batched-tokens", 64]
    assert main(["generate", *map(str, arguments)]) == 0, capsys.readouterr().err
    assert "with the prompt and a window of 8" in capsys.readouterr().out
    [request] = json.loads((tmp_path / "report.json").read_text())["requests"]
    config = EngineConfig(num_blocks=100, max_model_len=200, max_num_seqs=1, max_num_batched_tokens=64)
    window = StreamingWindow(size=8, keeps_prompt=True)
    engine = LLMEngine.from_folder(folder, config, dtype="float32", streaming=window)
    [result] = engine.generate([golden.prompt], SamplingParams(max_tokens=40, temperature=0.0))
    assert request["output_token_ids"] == result.output_token_ids.tolist()


def test_a_bad_file_of_inputs_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    np.savez(file, features=np.zeros(3))
    with pytest.raises(ValueError, match=r"a.npz: expected encoder_features, .*, got features"):
        read_inputs(file)
    file.write_text("no arrays")
    with pytest.raises(ValueError, match=r"a.npz: expected an .npz file of arrays, got"):
        read_inputs(file)


def test_quantised_projections_may_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of fp8 give the dequantised model's tokens; a model without any is refused."""
    folder, report = QUANTISED / "fp8_block", tmp_path / "report.json"
    with np.load(folder / "goldens.npz") as golden:
        prompt, greedy = golden["prompt"].tolist(), golden["greedy"].tolist()
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt_token_ids": prompt}) + "\n")
    arguments = ["generate", "--prompts", tmp_path / "prompts.jsonl", "--dtype", "float32", "--keep-quantised"]
    arguments += ["--max-tokens", len(greedy), "--temperature", 0, "--json", report]
    assert main([*map(str, arguments), "--model", str(folder)]) == 0, capsys.readouterr().err
    (request,) = json.loads(report.read_text())["requests"]
    assert request["output_token_ids"] == greedy
    assert main([*map(str, arguments), "--model", str(model_folder("llama"))]) == 2
    assert (
        "expected projections in float8, or in int8 without zero points, to keep quantised" in capsys.readouterr().err
    )

"""The serving loop of `examples/` gives the engine's tokens, and leaves nothing behind."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

from kvjax.demo import demo_model_path, demo_requests
from kvjax.engine import EngineConfig, LLMEngine, SamplingParams
from kvjax.models import load_model
from kvjax.planning import plan_kv_cache
from tests.models.golden_models import model_folder

PATH = Path(__file__).parents[2] / "examples" / "serving_loop.py"
MAX_TOKENS = 24


@pytest.mark.parametrize(
    ("name", "num_blocks"),
    [
        pytest.param("demo", 120, marks=pytest.mark.sweep),
        pytest.param("demo", 600, marks=pytest.mark.sweep),
        pytest.param("qwen3", 600, marks=pytest.mark.sweep),
    ],
)
def test_tokens_are_the_engines(name: str, num_blocks: int) -> None:
    """With blocks for all at once and for few; requests share prefixes, some of them end by the model's own token."""
    example = runpy.run_path(str(PATH))
    model = load_model(demo_model_path() if name == "demo" else model_folder(name), "float32")
    if model.tokenizer is not None:
        prompts = [list(model.tokenizer.encode(request.prompt)) for request in demo_requests()]
    else:
        prompts = [[(7 * i + j) % 50 + 1 for j in range(5 + 9 * (i % 5))] for i in range(12)]
    max_model_len, in_flight = example["MAX_MODEL_LEN"], example["MAX_IN_FLIGHT"] * example["MAX_STEP_TOKENS"]
    length = min(max_model_len, model.config.max_model_len)
    specs = model.config.kv_cache_specs(example["BLOCK_SIZE"])
    plan = plan_kv_cache(
        specs, num_blocks=num_blocks, max_model_len=length, max_in_flight_tokens=in_flight, platform="cpu"
    )
    server = example["Server"](model.module, plan.config, model.config.eos_token_ids)
    for i, prompt in enumerate(prompts):
        server.add(str(i), prompt, MAX_TOKENS)
    found = server.serve()
    config = EngineConfig(num_blocks=600, max_model_len=length, max_num_batched_tokens=64, max_buckets=1)
    results = LLMEngine(model, config).generate(prompts, SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0))
    assert found == {str(i): result.output_token_ids.tolist() for i, result in enumerate(results)}
    server.manager.check_invariants()
    assert server.manager.usage == 0
    assert not len(server.manager.request_table)


def test_the_example_needs_core_and_device_alone() -> None:
    """Above `main`, which takes the demo model: of kvjax only `kvjax.core` and `kvjax.device` are imported."""
    imported = {
        node.module
        for node in ast.parse(PATH.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvjax")
    }
    assert imported == {"kvjax.core", "kvjax.device"}


def test_the_example_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(PATH), run_name="__main__")
    out = capsys.readouterr().out
    assert all(f"--- {request.name}\n" in out for request in demo_requests())

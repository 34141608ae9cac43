"""Checkpoints that people download: the cache of each is planned as `kvjax plan` does, and a small one of each runs.

Those of configs/models are among them, which the package ships.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

from kvjax.cli.main import main
from kvjax.engine import EngineConfig, LLMEngine, SamplingParams
from kvjax.errors import ConfigError
from kvjax.models import LoadedModel, ModelConfig, build_model
from kvjax.models.registry import ARCHITECTURES
from tests.models.released.experts import SPARSE
from tests.models.released.llamas import DENSE
from tests.models.released.outer import INNER
from tests.models.released.released import SHIPPED, Released
from tests.models.released.shrink import shrunk

SHIPPED_ONES = tuple(
    Released(file.stem, SHIPPED, json.loads(file.read_text(encoding="utf-8")))
    for file in sorted((Path(__file__).parents[3] / "configs" / "models").glob("*.json"))
)
RELEASED = (*DENSE, *SPARSE, *INNER, *SHIPPED_ONES)
READ = tuple(one for one in RELEASED if one.refused is None)
WITHOUT_A_SOURCE = frozenset(
    ["Cohere2ForCausalLM", "Glm4ForCausalLM", "Ministral3ForCausalLM"]
    + ["Lfm2MoeForCausalLM", "Lfm3ForCausalLM"]
    + ["MistralLarge4ForConditionalGeneration"]
)
# One of each sort: a window beside full attention, layers without rotation, experts in some layers and in all.
RUN_ALWAYS = ("Olmo-3-7B-Instruct", "SmolLM3-3B", "GLM-4.5", "MiniMax-M2.5")
CONFIG = EngineConfig(
    block_size=16,
    num_blocks=64,
    max_model_len=48,
    max_num_seqs=2,
    max_num_batched_tokens=16,  # so that the prompt comes in two chunks
    max_buckets=1,
)


def test_there_are_sixty_and_few_are_refused() -> None:
    assert len({one.name for one in RELEASED}) == len(RELEASED) >= 60
    assert len(READ) >= 55
    assert all(one.source for one in RELEASED)


def test_almost_every_architecture_has_one() -> None:
    """Those around a language model stand for it, and the reverse."""
    found = {ModelConfig.from_dict(one.data).architecture.partition("For")[0] for one in READ}
    missing = {name for name in ARCHITECTURES if name.partition("For")[0] not in found}
    assert missing <= WITHOUT_A_SOURCE


@pytest.mark.parametrize("one", [pytest.param(one, id=one.name) for one in RELEASED if one.refused is not None])
def test_one_that_is_not_read_is_refused_in_a_line(one: Released) -> None:
    with pytest.raises(ConfigError, match=str(one.refused)) as refusal:
        ModelConfig.from_dict(one.data)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("one", [pytest.param(one, id=one.name) for one in READ])
def test_a_cache_is_planned(one: Released, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For one request of 4,096 tokens, quantised weights or not."""
    file, report = tmp_path / "config.json", tmp_path / "plan.json"
    file.write_text(json.dumps(one.data), encoding="utf-8")
    arguments = ["plan", file, "--memory", "1TB", "--json", report]
    assert main([str(argument) for argument in arguments]) == 0, capsys.readouterr().err
    assert json.loads(report.read_text())


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(one, id=one.name, marks=[] if one.name.endswith(RUN_ALWAYS) else [pytest.mark.sweep])
        for one in READ
    ],
)
def test_a_small_one_of_it_runs(one: Released) -> None:
    """Random weights: a prompt in chunks, then single tokens, the same ones a second time from the cache."""
    config: Any = ModelConfig.from_dict(shrunk(one.data)).for_length(CONFIG.max_model_len or 0)
    config = dataclasses.replace(config, quant_method=None)  # as weights are that were made bfloat16 at load
    module = build_model(config, dtype="float32", rngs=nnx.Rngs(0))
    settings = dataclasses.replace(CONFIG, block_size=config.default_block_size)
    engine = LLMEngine(LoadedModel(config, module, None), settings)
    shape = next(iter(config.encoder_shapes), None)
    features = {} if shape is None else {"encoder_features": np.ones(shape, np.float32)}
    params = SamplingParams(max_tokens=6, temperature=0.0)
    ids = [engine.add_request(list(range(5, 25)), params, **features)]
    results: dict[str, Any] = {}
    while engine.num_unfinished or len(ids) < 2:
        if not engine.num_unfinished:
            ids.append(engine.add_request(list(range(5, 25)), params, **features))
        results |= {result.request_id: result for result in engine.step().results.values()}
    first, again = (results[request_id].output_token_ids.tolist() for request_id in ids)
    assert first == again
    assert len(first) > 0
    assert max(first) < config.vocab_size

"""Every family of models that the suite of test_families.py runs: a new one is a line in `FAMILIES`.

A family's engines share one compiled step. It also gives the logits that it sampled from (`RecordingEngine`), so that
tokens and logits are compared in the same runs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from math import lcm
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from kvjax.engine import EngineConfig, GenerationResult, LLMEngine, MultimodalInput, SamplingParams
from kvjax.engine.sampling.sampler import sample
from kvjax.engine.sampling.sampling_table import SamplingBatch
from kvjax.engine.step.host_loop import HostStep
from kvjax.engine.step.model_runner import ModelRunner
from kvjax.models import LoadedModel, StreamingWindow, load_model
from tests.models.golden_models import Golden, goldens_of, model_folder

NUM_GREEDY_TOKENS = 32
ATOL = 1e-4  # of float32 logits


@dataclass(frozen=True)
class Family:
    """How one golden model is run.

    One whose layers keep the caches of another family's, with other projections or experts say, is a `variant`: its
    logits and tokens are compared, and what scheduling does to it is left to sweeps; of one that is `swept` all is.
    With `memory_bytes` its kinds of layers share one memory of so many, with `ring_tokens` its recurrent states have
    rings.
    """

    name: str  # of its folder in goldens
    variant: bool = False
    swept: bool = False
    block_size: int = 8
    num_blocks: int = 400
    max_model_len: int = 136  # the longest prompt and its continuation
    streaming: StreamingWindow | None = None
    memory_bytes: int | None = None
    ring_tokens: int | None = None

    @property
    def id(self) -> str:
        """What names it among all."""
        if self.ring_tokens is not None:
            return f"{self.name}_in_rings"
        return self.name if self.memory_bytes is None else f"{self.name}_in_slabs"


OF_PARTS = (
    "olmo2",
    "olmo3",
    "smollm3",
    "gemma",
    "glm4",
    "glm4_moe",
    "cohere",
    "cohere2",
    "granite",
    "ministral3",
    "mistral3",
    "minimax_m2",
    "qwen2_5_vl",
)
FAMILIES = (
    Family("llama"),
    Family("llama_linear", variant=True),
    Family("llama_dynamic", variant=True, max_model_len=192),  # the longest that the scaling makes
    Family("llama_yarn", variant=True),
    Family("streaming_llm", streaming=StreamingWindow(size=16, num_sink_tokens=4)),
    Family("qwen2", variant=True),
    Family("qwen3", variant=True),
    Family("mistral", variant=True),
    Family("phi3", variant=True),
    Family("phi3_longrope", variant=True),
    Family("gemma2", variant=True),
    Family("gemma3"),
    Family("mixtral", variant=True),
    Family("qwen3_moe", variant=True),
    Family("deepseek_v2", variant=True),
    Family("deepseek_v3"),
    Family("deepseek_v32"),
    Family("deepseek_v32_odd", variant=True, swept=True),
    Family("glm_moe_dsa", variant=True),
    Family("glm_moe_dsa_odd", variant=True, swept=True),
    Family("mistral_large4", variant=True),
    Family("mistral_large4_odd", variant=True, swept=True),
    Family("deepseek_v4", block_size=128, max_model_len=240),
    Family("deepseek_v4_sparse", variant=True, block_size=128, max_model_len=240),
    Family("gpt_oss", variant=True),
    Family("llama4"),
    Family("gemma3n"),
    Family("gemma4", variant=True),
    Family("jamba"),
    Family("granite_moe_hybrid"),
    Family("qwen3_next"),
    Family("qwen3_5", variant=True),
    Family("kimi_linear"),
    Family("nemotron_h", variant=True),
    Family("lfm2", variant=True),
    Family("lfm2_moe"),
    Family("lfm3", variant=True),
    Family("lfm3_odd", variant=True, swept=True),
    Family("mamba2"),
    Family("mamba2_odd", variant=True),
    Family("falcon_h1"),
    Family("falcon_h1_odd", variant=True),
    Family("olmo_hybrid", variant=True),
    Family("olmo_hybrid_odd", variant=True),
    Family("whisper"),
    Family("qwen3_vl"),
    *(Family(name, variant=True) for name in OF_PARTS),
    *(Family(f"{name}_odd", variant=True, swept=True) for name in OF_PARTS),
)
IN_SLABS = tuple(
    Family(name, memory_bytes=4 << 20)
    for name in (
        "jamba",
        "granite_moe_hybrid",
        "qwen3_next",
        "qwen3_5",
        "kimi_linear",
        "nemotron_h",
        "lfm2_moe",
        "falcon_h1",
        "olmo_hybrid",
        "gemma4",
    )
)

IN_RINGS = tuple(
    Family(name, ring_tokens=8)
    for name in (
        "granite_moe_hybrid",
        "qwen3_next",
        "qwen3_5",
        "kimi_linear",
        "nemotron_h",
        "mamba2",
        "falcon_h1",
        "olmo_hybrid",
    )
)


def _every_family(*, variants: bool) -> pytest.MarkDecorator:
    """Of a module's scope: pytest runs all tests of a family one after another, in a process that has its step."""
    others = (*IN_SLABS, *IN_RINGS)
    marks = {
        family: [pytest.mark.sweep] if family in others or family.swept or (family.variant and not variants) else []
        for family in (*FAMILIES, *others)
    }
    params = [pytest.param(family, id=family.id, marks=marks[family]) for family in marks]
    return pytest.mark.parametrize("family", params, scope="module")


every_family, every_family_but_variants = _every_family(variants=True), _every_family(variants=False)
every_recurrent_family = pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=family.name, marks=[] if family.name == "qwen3_next" else [pytest.mark.sweep])
        for family in IN_SLABS
        if family.name != "gemma4"
    ],
)


class Recorded(NamedTuple):
    """What a step gives of each row of logits."""

    logprobs: jax.Array  # float32[N]
    logits: jax.Array  # float32[N, vocab]


def sample_and_record(logits: jax.Array, batch: SamplingBatch) -> tuple[jax.Array, Recorded]:
    """As the engine samples, with the logits beside."""
    tokens = sample(logits, batch)
    return tokens.token_ids, Recorded(tokens.logprobs, logits)


class RecordingRunner(ModelRunner):
    """A runner that remembers the logits of every sampled token: `logits[request id][k]` chose output token k."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.logits: dict[str, list[np.ndarray]] = {}
        super().__init__(*args, **kwargs)

    def dispatch(self, step: HostStep) -> None:
        super().dispatch(step)
        flight = self._flights.pop()
        recorded: Any = flight.logprobs
        owners = np.searchsorted(step.plan.query_start_loc, step.plan.logits_indices, side="right") - 1
        for owner, row in zip(owners, np.asarray(recorded.logits), strict=False):
            self.logits.setdefault(step.plan.request_ids[owner], []).append(row)
        self._flights.append(dataclasses.replace(flight, logprobs=recorded.logprobs))


class RecordingEngine(LLMEngine):
    """An engine whose runner records."""

    runner_type = RecordingRunner

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, sample_fn=sample_and_record, **kwargs)

    @property
    def logits(self) -> dict[str, list[np.ndarray]]:
        """By request id, those of its output tokens."""
        return self._runner.logits


@functools.cache
def loaded(family: Family) -> LoadedModel:
    """The family's golden model in float32."""
    return load_model(model_folder(family.name), "float32", streaming=family.streaming)


def engine_config(family: Family, **settings: Any) -> EngineConfig:
    """The settings of the family's engines, changed by `settings`."""
    base = EngineConfig(
        block_size=family.block_size,
        num_blocks=family.num_blocks,
        max_model_len=family.max_model_len,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_buckets=1,
        watermark=0.0,
        state_block_size=None,  # one plan for engines with a cache and without; `test_state_blocks` has short ones
    )
    if family.ring_tokens is not None:
        base = dataclasses.replace(base, ring_tokens=family.ring_tokens)
    if family.memory_bytes is not None:
        base = dataclasses.replace(base, num_blocks=None, memory_bytes=family.memory_bytes, one_memory=True)
    return dataclasses.replace(base, **settings)


@functools.cache
def base_engine(family: Family) -> RecordingEngine:
    """Holds the family's compiled step; runs nothing itself."""
    return RecordingEngine(loaded(family), engine_config(family))


def make_engine(family: Family, **settings: Any) -> RecordingEngine:
    """An engine of the family with settings of its own, without a compilation of its own."""
    return RecordingEngine(loaded(family), engine_config(family, **settings), like=base_engine(family))


def greedy_params(max_tokens: int = NUM_GREEDY_TOKENS) -> SamplingParams:
    """The best token, always."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


def add_golden(engine: LLMEngine, golden: Golden, params: SamplingParams, **kwargs: Any) -> str:
    """Queues a golden's prompt with all that belongs to it."""
    return engine.add_request(golden.prompt, params, **inputs_of(golden), **kwargs)


def inputs_of(golden: Golden) -> dict[str, Any]:
    """What the prompt is given with beside its tokens, as arguments of `add_request`; the prompt may have been cut."""
    extras, length = golden.extras, len(golden.prompt)
    inputs: dict[str, Any] = {}
    if "features" in extras:
        inputs["encoder_features"] = extras["features"]
    places = extras.get("embed_tokens", np.zeros(0, np.int32))
    places = places[places < length]
    if places.size:
        rows = np.concatenate([extras["embeds"], *extras["deepstack"]], axis=1)[: places.size]
        breaks = np.flatnonzero(np.diff(places) > 1) + 1
        inputs["embeddings"] = [
            MultimodalInput(embeds=image, start=int(tokens[0]))
            for image, tokens in zip(np.split(rows, breaks), np.split(places, breaks), strict=True)
        ]
        inputs["prompt_positions"] = extras["rope_positions"][:, :length]
    return inputs


def run_goldens(
    engine: RecordingEngine, family: Family, params: SamplingParams | None = None
) -> list[tuple[Golden, GenerationResult]]:
    """All prompts of the family, queued at once, and what became of them."""
    goldens = goldens_of(family.name)
    ids = [add_golden(engine, golden, params or greedy_params()) for golden in goldens]
    results = drain(engine)
    return [(golden, results[request_id]) for golden, request_id in zip(goldens, ids, strict=True)]


def run_preempted(engine: RecordingEngine, family: Family) -> list[tuple[Golden, GenerationResult]]:
    """`run_goldens`; every third step the last running request loses all it has."""
    goldens = {add_golden(engine, golden, greedy_params()): golden for golden in goldens_of(family.name)}
    results: dict[str, GenerationResult] = {}
    for step in itertools.count():
        if step % 3 == 2 and len(engine.scheduler.running) > 1:
            engine.scheduler.preempt_last()
        results |= {result.request_id: result for result in engine.step().results.values()}
        if len(results) == len(goldens):
            break
    return [(golden, results[request_id]) for request_id, golden in goldens.items()]


def drain(engine: LLMEngine) -> dict[str, GenerationResult]:
    """Runs the engine until it has nothing to do; results by request id."""
    results: dict[str, GenerationResult] = {}
    while engine.num_unfinished or engine._runner.num_in_flight:
        results |= {result.request_id: result for result in engine.step().results.values()}
    return results


def tokens_of_a_hit(engine: LLMEngine) -> int:
    """Tokens that are whole blocks of every group, the fewest that can be a hit."""
    return lcm(*(group.kv_cache_spec.block_size for group in engine.plan.config.kv_cache_groups))


def assert_golden(engine: RecordingEngine, golden: Golden, result: GenerationResult, atol: float = ATOL) -> None:
    """Tokens are Hugging Face's, and the logits that chose them within `atol`."""
    np.testing.assert_array_equal(result.output_token_ids, golden.greedy, err_msg=result.request_id)
    got = np.stack(engine.logits[result.request_id])[: len(golden.greedy)]
    np.testing.assert_allclose(got, golden.decode_logits, atol=atol, rtol=0, err_msg=result.request_id)


def assert_nothing_is_left(engine: LLMEngine) -> None:
    """No block, row or request."""
    engine.check_invariants()
    assert engine.manager.usage == 0
    assert engine.num_unfinished == 0
    assert len(engine.manager.request_table) == 0

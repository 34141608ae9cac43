"""An engine that computes prompts and one that decodes, of other page sizes: tokens are those of one engine alone."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from kvjax.engine import EngineConfig, GenerationResult, LLMEngine, SamplingParams
from kvjax.models import load_model
from kvjax.transfer import DecodeConnector, PageClient, PageServer, PrefillConnector
from tests.engine.engines import assert_no_leak
from tests.models.golden_models import Golden, goldens_of, model_folder

NUM_TOKENS = 8


def config_of(block_size: int) -> EngineConfig:
    return EngineConfig(
        block_size=block_size,
        num_blocks=600,
        max_model_len=136,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_buckets=1,
        enable_prefix_caching=True,
    )


def drained(engine: LLMEngine) -> dict[str, GenerationResult]:
    """All results, by request."""
    results = {}
    while engine.has_work:
        results |= {result.request_id: result for result in engine.step().results.values()}
    return results


class Pair:
    """Both engines of one model, in this process, and what they make of its goldens."""

    def __init__(self, name: str) -> None:
        model = load_model(model_folder(name), "float32")
        self.goldens = {f"r{i}": golden for i, golden in enumerate(goldens_of(name))}
        self.source = PrefillConnector(PageServer(), weights_version="1")
        self.late_s = self.seconds_a_look = 0.0  # by which the decode side's clock is ahead, and gets ahead
        self.target = DecodeConnector(PageClient(), weights_version="1", clock=self.clock)
        self.prefill = LLMEngine(model, config_of(8), connector=self.source)
        self.decode = LLMEngine(model, config_of(16), connector=self.target)

    def clock(self) -> float:
        self.late_s += self.seconds_a_look
        return time.monotonic() + self.late_s

    def compute_prompts(self) -> None:
        for request_id, golden in self.goldens.items():
            params = SamplingParams(max_tokens=1, temperature=0.0)
            self.prefill.add_request(golden.prompt, params, request_id=request_id)
        for request_id, result in drained(self.prefill).items():
            assert result.output_token_ids.tolist() == self.goldens[request_id].greedy[:1].tolist()
        self.prefill.step()  # which reads the pages of those that ended last
        assert_no_leak(self.prefill)

    def add(self, request_id: str, golden: Golden) -> None:
        """To the decode engine: the prompt, and the token that the other engine has computed."""
        prompt = [*golden.prompt.tolist(), int(golden.greedy[0])]
        self.decode.add_request(prompt, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0), request_id=request_id)

    def assert_golden(self, results: dict[str, GenerationResult]) -> None:
        for request_id, golden in self.goldens.items():
            tokens = results[request_id].output_token_ids.tolist()
            assert tokens == golden.greedy[1 : 1 + NUM_TOKENS].tolist(), request_id
        assert_no_leak(self.decode)


@pytest.mark.parametrize(
    "name", ["gemma3", *(pytest.param(name, marks=pytest.mark.sweep) for name in ("llama", "deepseek_v3", "jamba"))]
)
def test_what_one_computes_the_other_decodes(name: str) -> None:
    """Then again with a prefix hit on the decode side; then with tickets that nobody answers, and an abort."""
    pair = Pair(name)
    pair.compute_prompts()
    for request_id, golden in pair.goldens.items():
        pair.target.expect(request_id, pair.source.take_ticket(request_id))
        pair.add(request_id, golden)
    results = drained(pair.decode)
    pair.assert_golden(results)
    computed = sum(step.num_new_tokens for step in pair.decode.step_stats)
    assert computed == NUM_TOKENS * len(results)  # of no prompt more than the token that came with it

    pair.compute_prompts()
    for request_id, golden in pair.goldens.items():
        pair.target.expect(request_id, pair.source.take_ticket(request_id))
        pair.add(request_id, golden)
    pair.assert_golden(drained(pair.decode))
    assert pair.target.num_failed == 0

    pair.decode.reset()
    pair.compute_prompts()
    for request_id, golden in pair.goldens.items():
        pair.target.expect(request_id, replace(pair.source.take_ticket(request_id), uuid=10_000))
        pair.add(request_id, golden)
    pair.seconds_a_look = 40.0
    pair.decode.step()
    pair.decode.abort("r0")
    pair.add("r0", pair.goldens["r0"])
    pair.assert_golden(drained(pair.decode))
    assert pair.target.num_failed == len(pair.goldens) - 1


def test_a_request_without_a_ticket_is_told_what_to_do() -> None:
    with pytest.raises(KeyError, match=r"request 'a' has no ticket; run a step\(\) after its end"):
        PrefillConnector(PageServer()).take_ticket("a")

"""A step in pieces is the step: same outputs, pages in place, and each piece that differs compiled once."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from kvjax.core import KVCacheManager, Request
from kvjax.core.step.step_builder import build_step_plan
from kvjax.device import Bucket, Buckets, UpdateStep, create_pages, make_update_step
from kvjax.device.programs.step_cuts import LEAST_LAYERS, MOST_LAYERS, layer_cuts
from kvjax.models import ModelConfig, build_model
from kvjax.planning import KVCachePlan, plan_kv_cache

BUCKETS = Buckets((Bucket(4, 4, 4), Bucket(16, 4, 4)), page_counts=(8,))
NUM_BLOCKS = 1000  # pages larger than a step's temporaries


def config_of(num_layers: int, **others: Any) -> ModelConfig:
    """A small Gemma 3 whose every third layer is full; two kinds of layers, two rotary tables."""
    data = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "sliding_window": 8,
        "layer_types": ["full_attention" if i % 3 == 2 else "sliding_attention" for i in range(num_layers)],
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    return ModelConfig.from_dict(data | others)


class Serving:
    """One model, with steps cut or whole, over pages of its own."""

    def __init__(self, num_layers: int, *, cut_layers: bool, **options: Any) -> None:
        config = config_of(num_layers)
        self.plan: KVCachePlan = plan_kv_cache(
            config.kv_cache_specs(8, "float32"),
            max_model_len=32,
            num_blocks=NUM_BLOCKS,
            max_in_flight_tokens=16,
            platform="cpu",
        )
        model = build_model(config, dtype="float32", rngs=nnx.Rngs(0))
        self.step: UpdateStep = make_update_step(model, self.plan.config, BUCKETS, cut_layers=cut_layers, **options)
        self.pages = create_pages(self.plan.config)

    def run(self, steps: list[list[int]], seed: int) -> list[np.ndarray]:
        """The logits of requests that compute so many tokens each, step by step."""
        rng = np.random.default_rng(seed)
        manager = KVCacheManager(self.plan.config, 32, 8, enable_caching=False)
        requests = [Request(f"r{i}", rng.integers(0, 32, 30).astype(np.int32)) for i in range(len(steps[0]))]
        logits = []
        for counts in steps:
            for request, count in zip(requests, counts, strict=True):
                assert manager.allocate_slots(request, count) is not None
            rows = np.array([request.row for request in requests])
            num_new = np.array(counts, np.int64)
            plan = build_step_plan(manager, rows, num_new, wants_logits=np.ones(len(rows), bool))
            output = self.step(self.pages, plan)
            self.pages = output.pages
            assert output.logits is not None
            logits.append(np.asarray(output.logits)[: len(rows)])
            for request, count in zip(requests, counts, strict=True):
                request.num_computed_tokens += count
        return logits


@pytest.fixture(scope="module")
def cut() -> Serving:
    return Serving(12, cut_layers=True)


def test_a_cut_step_computes_what_the_whole_does(cut: Serving) -> None:
    """Prompts in chunks, decoding, padded steps of both buckets."""
    whole = Serving(12, cut_layers=False)
    steps = [[5, 7], [1, 9], [1, 1], [1, 1]]
    for ours, theirs in zip(cut.run(steps, 0), whole.run(steps, 0), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
    for ours, theirs in zip(jax.tree.leaves(cut.pages), jax.tree.leaves(whole.pages), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)


def test_pages_of_a_cut_step_stay_in_place(cut: Serving) -> None:
    """Each piece has its own layers' pages, and no piece makes room for another's."""
    modules = cut.step.compiled_programs(cut.pages, BUCKETS.steps[1])
    page_bytes = [leaf.nbytes for leaf in jax.tree.leaves(cut.pages)]
    aliased = sum(module.memory_analysis().alias_size_in_bytes for module in modules)
    assert aliased >= sum(page_bytes)  # more where layers of several groups share an array
    assert all(module.memory_analysis().temp_size_in_bytes < min(page_bytes) for module in modules)


def test_pieces_alike_are_one_program(cut: Serving) -> None:
    """Twelve layers in two pieces of six: what comes before them, the pieces, what comes behind."""
    modules = cut.step.compiled_programs(cut.pages, BUCKETS.steps[0])
    assert len(modules) == 4
    assert len({id(module) for module in modules}) == 3
    with pytest.raises(ValueError, match="expected a step of one program, got 4"):
        cut.step.compiled(cut.pages, BUCKETS.steps[0])


def test_buckets_count_as_compiled_once(cut: Serving) -> None:
    cut.run([[3], [1]], 1)
    compiled = cut.step.num_compiled
    cut.run([[4], [1], [2]], 2)
    assert cut.step.num_compiled == compiled == 2


def test_a_model_of_few_layers_is_one_program() -> None:
    serving = Serving(5, cut_layers=True)
    assert len(serving.step.compiled_programs(serving.pages, BUCKETS.steps[0])) == 1


@pytest.mark.parametrize(
    ("kinds", "sizes", "num_compiled"),
    [
        ("a" * 32, [4] * 8, 4),
        ("a" * 30, [5] * 6, 5),
        ("aaaaab" * 10 + "aa", [6] * 10 + [2], 8),
        ("aaab" * 12, [4] * 12, 4),
        ("ab" * 18, [4] * 9, 4),
        ("aaa" + "b" * 58, [4] * 15 + [1], 9),
    ],
    ids=["llama", "thirty", "gemma 3", "qwen 3 next", "gpt-oss", "deepseek v3"],
)
def test_pieces_follow_the_period_of_the_layers(kinds: str, sizes: list[int], num_compiled: int) -> None:
    cuts = layer_cuts(kinds)
    assert [end - start for start, end in cuts] == sizes
    assert sum(map(len, {kinds[start:end] for start, end in cuts})) == num_compiled


@pytest.mark.parametrize("kinds", ["", "a", "aaaaa", "abcdefghijkl", "aaaaab", "aaaaaaa"])
def test_a_cut_that_saves_less_than_half_is_not_made(kinds: str) -> None:
    assert layer_cuts(kinds) == []


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_all_layers_in_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kinds = "".join(rng.choice(list("ab"), rng.integers(1, 5))) * int(rng.integers(1, 20))
    cuts = layer_cuts(kinds)
    assert [layer for start, end in cuts for layer in range(start, end)] in ([], list(range(len(kinds))))
    assert all(end - start <= MOST_LAYERS for start, end in cuts)
    assert all(end - start >= LEAST_LAYERS for start, end in cuts[:-1])


@pytest.mark.parametrize("cut_layers", [True, False])
def test_compiler_options_reach_xla(cut_layers: bool) -> None:
    """In a chain of programs as in one: an option that XLA does not know is named, and the pages stay as they were."""
    serving = Serving(12, cut_layers=cut_layers, compiler_options={"xla_no_such_option": True})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        serving.run([[3]], seed=0)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(serving.pages))


def test_compiler_options_change_no_logits(cut: Serving) -> None:
    """Those that XLA may follow in any way it likes, within the tolerance of float32 products."""
    steps = [[5, 3], [1, 4]]
    fast = Serving(12, cut_layers=True, compiler_options={"xla_cpu_enable_fast_min_max": True})
    for given, wanted in zip(fast.run(steps, seed=3), cut.run(steps, seed=3), strict=True):
        np.testing.assert_allclose(given, wanted, atol=3e-5, rtol=1e-4)

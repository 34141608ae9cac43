"""What an engine computes with: a disk's KV is used by the same computation alone, and a version names one set."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from kvjax.core import BlockHasher
from kvjax.engine import EngineConfig, LLMEngine, SamplingParams
from kvjax.models import LoadedModel, build_model, load_model
from kvjax.tiers.config import TierConfig
from kvjax.tiers.tiers import Tiers
from tests.models.golden_models import goldens_of, model_folder
from tests.spoiled_arrays import aligned

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


def config_of(folder: Path | None = None, **settings: Any) -> EngineConfig:
    base: dict[str, Any] = {
        "block_size": 8,
        "num_blocks": 80,
        "max_model_len": 136,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_buckets": 1,
    }
    name = settings.pop("weights", None)
    tiers = TierConfig(disk_folder=str(folder), disk_bytes=1 << 26, weights=name, write_through=True)
    return EngineConfig(**base | {"tiers": None if folder is None else tiers} | settings)


def load(name: str, max_model_len: int = 136) -> LoadedModel:
    return load_model(model_folder(name), "float32", max_model_len=max_model_len)


def scaled(model: LoadedModel, factor: float) -> nnx.Module:
    """The same module with other weights."""
    graph, state = nnx.split(model.module)
    return nnx.merge(graph, jax.tree.map(lambda array: array * factor, state))


@functools.cache
def base() -> LLMEngine:
    """Holds compiled steps, and has no cache."""
    return LLMEngine(load("llama"), config_of(enable_prefix_caching=False))


def run(engine: LLMEngine, prompt: Any) -> list[int]:
    (result,) = engine.generate([prompt], GREEDY)
    tokens: list[int] = result.output_token_ids.tolist()
    return tokens


def closed(engine: LLMEngine) -> None:
    assert engine.connector is not None
    engine.connector.flush()  # type: ignore[attr-defined]
    engine.connector.close()


def test_a_disk_is_not_of_the_other_factors_of_long_rope(tmp_path: Path) -> None:
    """The length chooses them; lengths that choose the same share a folder, and so do lengths of other models."""
    closed(LLMEngine(load("phi3_longrope", 136), config_of(tmp_path / "long")))
    closed(LLMEngine(load("phi3_longrope", 128), config_of(tmp_path / "long", max_model_len=128)))
    with pytest.raises(ValueError, match=r"is of another cache: .*rope\.long_factor .* here"):
        LLMEngine(load("phi3_longrope", 32), config_of(tmp_path / "long", max_model_len=32))
    for length in (136, 64):
        closed(LLMEngine(load("llama", length), config_of(tmp_path / "plain", max_model_len=length)))


@pytest.mark.parametrize("name", ["one name", None])
def test_a_disk_is_not_of_another_config_with_the_same_weights(tmp_path: Path, name: str | None) -> None:
    model = load("llama")
    closed(LLMEngine(model, config_of(tmp_path, weights=name)))
    rope = model.config.rope  # type: ignore[attr-defined]
    for changes in ({"rope": replace(rope, theta=2e4)}, {"sm_scale": 0.5}, {"norm_offset": 1.0}):
        config = replace(model.config, **changes)
        graph, state = nnx.split(build_model(config, rngs=nnx.Rngs(0)))
        module = nnx.merge(graph, nnx.state(model.module))
        del state
        told = "rope.theta" if "rope" in changes else next(iter(changes))
        with pytest.raises(ValueError, match=f"is of another cache: .*{told} "):
            LLMEngine(LoadedModel(config, module, None), config_of(tmp_path, weights=name))
        with pytest.raises(ValueError, match="is of another cache: module "):  # where the config tells nothing of it
            LLMEngine(LoadedModel(model.config, module, None), config_of(tmp_path, weights=name))


def test_a_disk_is_not_of_other_weights_or_precision(tmp_path: Path) -> None:
    model = load("llama")
    first = LLMEngine(model, config_of(tmp_path))
    closed(first)
    other = replace(model, module=scaled(model, 1.5))
    with pytest.raises(ValueError, match=r"is of another cache: weights '[0-9a-f]{32}' there, '[0-9a-f]{32}' here"):
        LLMEngine(other, config_of(tmp_path))
    with pytest.raises(ValueError, match="is of another cache: precision "):
        LLMEngine(model, config_of(tmp_path, compiler_options={"xla_cpu_enable_fast_min_max": True}))
    with jax.default_matmul_precision("highest"), pytest.raises(ValueError, match="is of another cache: precision "):
        LLMEngine(model, config_of(tmp_path))
    first.set_weights(1, scaled(model, 1.5))
    with pytest.raises(ValueError, match="is of another cache: weights "):  # it shares what the first computes with
        LLMEngine(model, config_of(tmp_path), like=first)
    closed(LLMEngine(model, config_of(tmp_path)))


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(6, 40))])
def test_tokens_with_a_disk_are_those_without_for_any_updates_and_restarts(tmp_path: Path, seed: int) -> None:
    """A version of other weights is refused, whoever named it; what is not refused computes as if there were no disk.

    Engines share their compiled steps; each begins with the model's own weights.
    """
    rng = np.random.default_rng(seed)
    model, like = base().model, base()
    prompt = goldens_of("llama")[int(rng.integers(4))].prompt
    factors: dict[str, float] = {}
    num_refused = 0
    for _ in range(2):
        expected(1.0, prompt)
        engine = LLMEngine(model, config_of(tmp_path), like=like)
        for _ in range(3):
            version, factor = f"v{rng.integers(2)}", float(rng.choice([1.0, 1.5, -1.0]))
            if factors.setdefault(version, factor) == factor:
                tokens = expected(factor, prompt)
                engine.set_weights(version, scaled(model, factor))
                assert run(engine, prompt) == tokens, (version, factor)
            else:
                num_refused += 1
                before = engine._maker.weight_version, engine._runner.update_step.weights
                with pytest.raises(
                    ValueError, match=f"expected a version that names no other weights, got '{version}'"
                ):
                    engine.set_weights(version, scaled(model, factor))
                assert before == (engine._maker.weight_version, engine._runner.update_step.weights)
        closed(engine)


def expected(factor: float, prompt: np.ndarray) -> list[int]:
    """Of an engine without a cache, which shares its compiled steps, and so its weights, with the others."""
    base().set_weights(f"{factor}", scaled(base().model, factor))
    return run(base(), prompt)


def test_tiers_that_served_another_engine_have_nothing_of_it() -> None:
    """Their host memory is of one engine, whatever it computed with."""
    prompt = goldens_of("llama")[0].prompt
    plain = expected(-1.0, prompt)
    assert expected(1.0, prompt) != plain
    hasher = BlockHasher(8, base().config.hash_algorithm, seed=str(base().config.seed))
    tiers = Tiers.of_process(TierConfig(host_bytes=1 << 24, write_through=True), base().plan.config, hasher)
    run(LLMEngine(base().model, config_of(), like=base(), connector=tiers), prompt)
    tiers.flush()
    assert tiers.host.num_held == 0
    expected(-1.0, prompt)
    assert run(LLMEngine(base().model, config_of(), like=base(), connector=tiers), prompt) == plain


def test_a_version_names_one_set_of_weights_without_a_disk_too() -> None:
    model = load("llama")
    engine = LLMEngine(model, config_of())
    engine.set_weights("v1")
    engine.set_weights("v2", scaled(model, 2.0))
    engine.set_weights("v1", model.module)
    with pytest.raises(ValueError, match=r"got 'v2', which named weights .* give each update a version of its own"):
        engine.set_weights("v2")
    engine.set_weights(2, scaled(model, 3.0))
    with pytest.raises(ValueError, match="got 2, which named weights"):
        engine.set_weights(2, model.module)


def test_weights_of_another_configuration_are_refused() -> None:
    """The compiled steps stay, so nothing but weights can change; a length of no effect is none."""
    model = load("phi3_longrope", 136)
    engine = LLMEngine(model, config_of())
    engine.set_weights(1, load("phi3_longrope", 130).module)
    with pytest.raises(ValueError, match="expected a model that differs from the engine's by its weights alone"):
        engine.set_weights(2, load("phi3_longrope", 32).module)


def test_an_engine_that_shares_steps_refuses_to_go_on_with_weights_that_it_was_not_told_of() -> None:
    model = load("llama")
    prompt = goldens_of("llama")[0].prompt
    first = LLMEngine(model, config_of())
    second = LLMEngine(model, config_of(), like=first)
    tokens = run(second, prompt)
    first.set_weights("new", scaled(model, -1.0))
    second.add_request(prompt, GREEDY, request_id="a")
    with pytest.raises(ValueError, match=r"call set_weights\(version\) here too"):
        second.step()
    second.abort("a")
    second.set_weights("new")
    new = run(second, prompt)
    assert new == run(first, prompt) != tokens


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(5, 20))])
def test_weights_that_the_caller_writes_later_are_not_the_models(seed: int) -> None:
    """Numpy leaves at addresses that XLA would take as they are, given when the engine is made and in updates."""
    rng = np.random.default_rng(seed)
    graph, state = nnx.split(base().model.module)
    numbers = jax.tree.map(lambda array: aligned(np.asarray(array)), state)
    engine = base()
    engine.set_weights(int(rng.integers(1 << 60)), nnx.merge(graph, numbers))
    kept = [np.asarray(array).copy() for array in engine._runner.update_step.weights.arrays]
    for leaf in jax.tree.leaves(numbers):
        leaf[...] = rng.normal(size=leaf.shape)
    for own, other in zip(kept, engine._runner.update_step.weights.arrays, strict=True):
        np.testing.assert_array_equal(own, other)

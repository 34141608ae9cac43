"""Tiers of an engine on a mesh: what host and disk give back is what was computed, whoever of the ranks computed it.

Run by `mesh_program` on its engine's compiled steps.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kvjax.engine import LLMEngine, SamplingParams
from kvjax.engine.step.rank_loops import RankLoops
from kvjax.models import load_model
from kvjax.tiers.config import TierConfig
from kvjax.tiers.tiers import Tiers
from tests.models.families import drain
from tests.models.golden_models import goldens_of, model_folder

NUM_TOKENS = 4
HOST = 1 << 24


def check_tiers(engine: LLMEngine, name: str, folder: Path) -> None:
    """Greedy tokens with tiers are Hugging Face's: after eviction, after a restart, and with loads that fail."""
    config = TierConfig(host_bytes=HOST, disk_folder=str(folder), disk_bytes=HOST, write_through=True)
    first = _with_tiers(engine, config)
    _generate(first, name, num_rounds=3)
    assert isinstance(first.connector, Tiers)
    assert first.connector.stats.num_host_loads > 0
    first.save_cache()
    first.connector.close()
    second = _with_tiers(engine, config)
    _generate(second, name)
    assert isinstance(second.connector, Tiers)
    stats = second.connector.stats
    assert stats.num_disk_loads > 0
    assert (stats.num_load_failures, stats.num_disk_errors) == (0, 0)
    second.connector.close()
    _open_on_one_device(engine, name, config)
    third = _with_tiers(engine, TierConfig(host_bytes=HOST))
    _generate(third, name)
    third.sleep()
    third.wake()
    if len(third.managers) > 1:
        _load_what_another_rank_computed(third, name)
        third.sleep()
        third.wake()

    def fail(*args: object) -> None:
        raise OSError("planted")

    assert isinstance(third.connector, Tiers)
    setattr(third.connector.worker, "_read_units", fail)  # noqa: B010
    _generate(third, name)
    assert third.connector.stats.num_load_failures > 0
    assert third.connector.host.num_held == 0


def _load_what_another_rank_computed(engine: LLMEngine, name: str) -> None:
    """Of two requests for one prompt the second goes to another rank, and loads what it has not computed."""
    golden = max(goldens_of(name), key=lambda golden: len(golden.prompt))
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    ids = [engine.add_request(golden.prompt, params) for _ in range(2)]
    assert isinstance(engine._loop, RankLoops)
    assert [engine._loop.rank_of(request_id) for request_id in ids] == [0, 1]
    for result in drain(engine).values():
        assert result.output_token_ids.tolist() == golden.greedy[:NUM_TOKENS].tolist()
        assert result.stats.num_cached_tokens > len(golden.prompt) // 2


def _open_on_one_device(engine: LLMEngine, name: str, tiers: TierConfig) -> None:
    """A folder that context ranks wrote, in another order, is refused; how they split the heads does not matter."""
    num_context = engine._runner.placement.num_context
    block_size = engine.config.block_size * num_context
    config = dataclasses.replace(engine.config, block_size=block_size, tiers=tiers)
    model = load_model(model_folder(name), "float32")
    if num_context > 1:
        with pytest.raises(
            ValueError, match=f"tokens 'interleaved over {num_context} context ranks' there, 'in order'"
        ):
            LLMEngine(model, config)
        return
    one = LLMEngine(model, config)
    _generate(one, name)
    assert isinstance(one.connector, Tiers)
    assert one.connector.stats.num_disk_loads > 0


def _with_tiers(engine: LLMEngine, tiers: TierConfig) -> LLMEngine:
    config = dataclasses.replace(engine.config, tiers=tiers)
    return LLMEngine(engine.model, config, mesh=engine._runner.placement.mesh, like=engine)


def _generate(engine: LLMEngine, name: str, num_rounds: int = 1) -> None:
    """The family's prompts, again and again: more than the pools hold."""
    goldens = goldens_of(name) * num_rounds
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    for golden, result in zip(goldens, engine.generate([golden.prompt for golden in goldens], params), strict=True):
        assert result.output_token_ids.tolist() == golden.greedy[:NUM_TOKENS].tolist(), result
    engine.check_invariants()
    assert isinstance(engine.connector, Tiers)
    engine.connector.scheduler.check_invariants()
    for manager in engine.managers:
        assert manager.usage == 0
        assert len(manager.request_table) == 0

"""Tiers of an engine over several processes: each keeps its own parts, and all load the same at the same steps.

Run by `mesh_program` on its engine's compiled steps, in every process.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import Mesh

from kvjax.device.mesh.processes import ProcessBoard
from kvjax.engine import LLMEngine, SamplingParams
from kvjax.tiers.config import TierConfig
from kvjax.tiers.processes.process_tiers import ProcessTiers
from kvjax.tiers.stats import TierStats
from tests.models.golden_models import goldens_of

NUM_TOKENS = 4
HOST = 1 << 24


def check_process_tiers(engine: LLMEngine, name: str, folder: Path) -> None:
    """Greedy tokens with tiers are Hugging Face's: after eviction, after a restart, and where one process fails."""
    config = disk_config(folder)
    first = with_tiers(engine, config)
    stats = generate(first, name, num_rounds=3)
    assert stats.num_host_loads > 0
    assert stats.num_load_failures == 0
    first.save_cache()
    connector_of(first).close()
    second = with_tiers(engine, config)
    stats = generate(second, name)
    assert stats.num_disk_loads > 0
    assert (stats.num_load_failures, stats.num_disk_errors) == (0, 0)
    connector_of(second).close()
    _refuse_another_mesh(engine, _copied(config, "of another mesh"))
    _lose_files(engine, name, _copied(config, "with losses"))
    _fail_in_one_process(engine, name)


def check_restarted(engine: LLMEngine, name: str, folder: Path) -> None:
    """What the processes of a run before left in the folder is loaded."""
    stats = generate(with_tiers(engine, disk_config(folder)), name)
    assert stats.num_disk_loads > 0
    assert (stats.num_load_failures, stats.num_disk_errors) == (0, 0)


def disk_config(folder: Path) -> TierConfig:
    return TierConfig(host_bytes=HOST, disk_folder=str(folder), disk_bytes=HOST, write_through=True, load_timeout_s=60)


def with_tiers(engine: LLMEngine, tiers: TierConfig) -> LLMEngine:
    config = dataclasses.replace(engine.config, tiers=tiers, steps_between_checks=4)
    return LLMEngine(engine.model, config, mesh=engine._runner.placement.mesh, like=engine)


def _copied(config: TierConfig, name: str) -> TierConfig:
    """Settings of a copy of the folder, made by process 0."""
    assert config.disk_folder is not None
    copy = Path(config.disk_folder) / name
    if jax.process_index() == 0:
        shutil.copytree(config.disk_folder, copy, ignore=lambda *_: {name, "of another mesh"})
    ProcessBoard(60.0).exchange("copied", name)
    return dataclasses.replace(config, disk_folder=str(copy))


def connector_of(engine: LLMEngine) -> ProcessTiers:
    assert isinstance(engine.connector, ProcessTiers)
    return engine.connector


def generate(engine: LLMEngine, name: str, num_rounds: int = 1) -> TierStats:
    """The family's prompts, again and again: more than the pools hold. All processes have the same units in the end."""
    goldens = goldens_of(name) * num_rounds
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    for golden, result in zip(goldens, engine.generate([golden.prompt for golden in goldens], params), strict=True):
        assert result.output_token_ids.tolist() == golden.greedy[:NUM_TOKENS].tolist(), result
    engine.check_invariants()
    connector = connector_of(engine)
    connector.scheduler.check_invariants()
    for manager in engine.managers:
        assert manager.usage == 0
    connector.flush()
    units = [[tiers.host.keys(), tiers.host.num_held] for tiers in connector.by_home]
    digest = hashlib.sha256(repr(units).encode()).hexdigest()
    assert len(set(ProcessBoard(60.0).exchange("units", digest))) == 1
    return connector.stats


def _lose_files(engine: LLMEngine, name: str, config: TierConfig) -> None:
    """Files that are gone from one process's disk, or damaged, are loaded by none."""
    third = with_tiers(engine, config)
    own = [tiers.disk.folder for tiers in connector_of(third).by_home if tiers.disk is not None]
    for folder in own if jax.process_index() == 0 else []:
        for i, path in enumerate(sorted(folder.glob("units/*/*"))):
            if i % 2:
                path.unlink()
            else:
                path.write_bytes(path.read_bytes()[:-1] + b"?")
    stats = generate(third, name)
    assert stats.num_load_failures > 0
    connector_of(third).close()


def _refuse_another_mesh(engine: LLMEngine, tiers: TierConfig) -> None:
    """Parts of other shape are of no use: where one process has some, all raise."""
    mesh = engine._runner.placement.mesh
    if mesh.axis_names != ("context",):
        return
    assert tiers.disk_folder is not None
    if jax.process_index() == 1:  # whose own folder is empty then
        shutil.rmtree(Path(tiers.disk_folder) / "ranks-0-part-1")
    blocks = engine.config.block_size * mesh.size
    config = dataclasses.replace(engine.config, tiers=tiers, block_size=blocks)
    with pytest.raises(ValueError, match=r"process 0 cannot open its disk: .* is of another cache: .*share 'part"):
        LLMEngine(engine.model, config, mesh=Mesh(mesh.devices, ("tensor",)))


def _fail_in_one_process(engine: LLMEngine, name: str) -> None:
    """Loads that fail in process 1 fail in all, at the same step."""
    engine = with_tiers(engine, TierConfig(host_bytes=HOST))
    generate(engine, name)
    engine.sleep()
    engine.wake()

    def fail(*args: Any) -> None:
        raise OSError("planted")

    if jax.process_index() == 1:
        for tiers in connector_of(engine).by_home:
            setattr(tiers.worker, "_read_units", fail)  # noqa: B010
    stats = generate(engine, name)
    assert stats.num_load_failures > 0
    assert all(tiers.host.num_held == 0 for tiers in connector_of(engine).by_home)

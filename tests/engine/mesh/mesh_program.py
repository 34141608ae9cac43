"""Run by tests in a process of its own: an engine of a golden model on a mesh gives Hugging Face's greedy tokens.

    python -m tests.engine.mesh.mesh_program FAMILY AXIS=SIZE ... [--auto] [--one-memory] [--tiers FOLDER] ...

The pool holds two or three requests at once, so some are preempted; prompts come twice, so the second is found in the
cache; every prompt is sampled twice, so one sample is forked from the other. With `--tiers` an engine with tiers
follows (`tiers_on_mesh`, `tiers_on_processes`); with `--restarted` there are units in the folder of a run before. With
`--one-memory` the pools share two thirds of what they else would have.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path

import jax
from jax.sharding import AxisType

from kvjax.device import join_processes
from kvjax.engine import LLMEngine, SamplingParams
from kvjax.models import load_model
from tests.engine.mesh.tiers_on_mesh import check_tiers
from tests.engine.mesh.tiers_on_processes import check_process_tiers, check_restarted
from tests.models.families import FAMILIES, NUM_GREEDY_TOKENS, add_golden, drain, engine_config
from tests.models.golden_models import goldens_of, model_folder

NUM_BLOCKS = {"gemma3": 87}  # of each pool: room for two or three requests at once
FEW_BLOCKS = 28


def make_engine(
    name: str, axes: dict[str, int], *, is_auto: bool, one_memory: bool = False, max_num_seqs: int = 4
) -> LLMEngine:
    """An engine whose host blocks have 8 tokens, whatever the ranks that share them."""
    family = next(family for family in FAMILIES if family.name == name)
    kinds = (AxisType.Auto if is_auto else AxisType.Explicit,) * len(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds)
    assert mesh.size == math.prod(axes.values())
    model = load_model(model_folder(name), "float32", mesh, streaming=family.streaming)
    num_blocks, block_size = NUM_BLOCKS.get(name, FEW_BLOCKS), 8 // axes.get("context", 1)
    config = engine_config(family, max_num_seqs=max_num_seqs, num_blocks=num_blocks, block_size=block_size)
    engine = LLMEngine(model, config, mesh=mesh)
    if not one_memory:
        return engine
    config = replace(config, num_blocks=None, memory_bytes=engine.plan.used_bytes * 2 // 3, one_memory=True)
    return LLMEngine(model, config, mesh=mesh)


def check(engine: LLMEngine, name: str) -> None:
    """Every sample of every prompt, twice; by then there were hits, preemptions and forks."""
    goldens = goldens_of(name)
    num_forks = num_preemptions = 0
    for _ in range(2):
        params = SamplingParams(max_tokens=NUM_GREEDY_TOKENS, temperature=0.0, n=2)
        for golden in goldens:
            add_golden(engine, golden, params)
        results = drain(engine)
        assert len(results) == 2 * len(goldens)
        for request_id, result in results.items():
            golden = next(golden for golden in goldens if golden.prompt.tolist() == result.prompt_token_ids.tolist())
            assert result.output_token_ids.tolist() == golden.greedy.tolist(), (request_id, result.output_token_ids)
            num_forks += result.stats.num_shared_tokens > 0
            num_preemptions += result.stats.num_preemptions
    hits = sum(stats.num_hit_tokens for stats in engine.step_stats)
    counts = (num_forks,) if engine.plan.slabs else (hits, num_preemptions, num_forks)  # slabs suit any load
    assert all(counts), counts
    engine.check_invariants()
    for manager in engine.managers:
        assert manager.usage == 0
        assert len(manager.request_table) == 0


def main() -> None:
    """As the module says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("family")
    parser.add_argument("axes", nargs="+")
    parser.add_argument("--auto", action="store_true")
    parser.add_argument("--one-memory", action="store_true")
    parser.add_argument("--tiers", type=Path, metavar="FOLDER", help="empty")
    parser.add_argument("--restarted", action="store_true")
    parser.add_argument("--deviation", choices=("settings", "requests"), help="of process 1 from the others")
    args = parser.parse_args()
    join_processes()
    deviates = args.deviation if jax.process_index() == 1 else None
    axes = {name: int(size) for name, size in (axis.split("=") for axis in args.axes)}
    max_num_seqs = 5 if deviates == "settings" else 4
    sizes = {"is_auto": args.auto, "one_memory": args.one_memory, "max_num_seqs": max_num_seqs}
    engine = make_engine(args.family, axes, **sizes)
    if deviates == "requests":
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=2))
    if args.restarted:
        check_restarted(engine, args.family, args.tiers)
        return
    check(engine, args.family)
    if args.tiers is not None and jax.process_count() > 1:
        check_process_tiers(engine, args.family, args.tiers)
    elif args.tiers is not None:
        check_tiers(engine, args.family, args.tiers)


if __name__ == "__main__":
    main()

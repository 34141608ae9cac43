"""Run by test_compile_mesh_steps.py in a process of its own: what steps of golden models send is the formula's.

    python -m tests.scripts.collectives_on_cpu FAMILY ...

On four virtual CPU devices, context x tensor, in float32.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

import jax

from kvjax.engine import EngineConfig, LLMEngine
from kvjax.models import load_model
from scripts.lab.collectives import bytes_over, collectives, expected_of
from tests.models.golden_models import model_folder


def check(name: str) -> None:
    """Every step shape of an engine."""
    mesh = jax.make_mesh((2, 2), ("context", "tensor"))
    config = EngineConfig(
        block_size=4, num_blocks=60, max_model_len=136, max_num_seqs=4, max_num_batched_tokens=32, max_buckets=1
    )
    engine = LLMEngine(load_model(model_folder(name), "float32", mesh), config, mesh=mesh)
    model = json.loads((model_folder(name) / "config.json").read_text())
    runner = engine._runner
    for bucket in runner.buckets.steps:
        programs = runner.update_step.compiled_programs(
            runner.pages, bucket, sampling=engine._loop.sampling.empty_batch(), sampler_state=runner._sampler_arrays
        )
        sent = sum((collectives(program.as_text(), mesh.shape) for program in programs), Counter())
        expected = expected_of(
            model,
            num_layers=model["num_hidden_layers"],
            num_tokens=bucket.num_tokens,
            num_context=2,
            num_shards=2,
            dtype="f32",
            compiler="cpu",
        )
        assert sent == expected, (name, sent - expected, expected - sent)
        print(name, bucket, {axis: bytes_over(sent, axis) for axis in mesh.shape})


if __name__ == "__main__":
    for family in sys.argv[1:]:
        check(family)

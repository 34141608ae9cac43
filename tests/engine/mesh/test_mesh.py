"""One engine on four devices gives the tokens of one on one, which are Hugging Face's, on meshes of either axes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import jax
from jax.sharding import AxisType
from kvjax.engine import LLMEngine
from kvjax.models import load_model
from tests.engine.engines import assert_greedy_is_golden, base_config
from tests.models.golden_models import model_folder

name, num_shards, async_scheduling = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "async"
config = base_config(name, async_scheduling=async_scheduling)
if sys.argv[4] == "explicit":
    mesh = jax.make_mesh((4,), ("tensor",))
    assert mesh.axis_types == (AxisType.Explicit,)
    engine = LLMEngine(load_model(model_folder(name), "float32", mesh), config, mesh=mesh)
else:
    engine = LLMEngine.from_folder(model_folder(name), config, num_devices=4, dtype="float32")
assert engine._runner.placement.num_shards == num_shards
pages = engine._runner.pages.column(0, 0)[0]
assert len(pages.sharding.device_set) == 4
assert pages.addressable_shards[0].data.shape[2] == pages.shape[2] // num_shards
assert_greedy_is_golden(engine, name)
assert_greedy_is_golden(engine, name)
"""


@pytest.mark.parametrize(
    ("name", "num_shards", "mode", "axes"),
    [
        ("gemma3", 4, "async", "auto"),
        ("gemma3", 4, "sync", "explicit"),  # as plain `jax.make_mesh` makes them
        ("demo", 4, "sync", "auto"),  # each of the demo's 2 KV heads lies on two devices
    ],
)
def test_four_devices_give_the_same_tokens(name: str, num_shards: int, mode: str, axes: str) -> None:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    program = [sys.executable, "-c", PROGRAM, name, str(num_shards), mode, axes]
    subprocess.run(program, check=True, timeout=280, env=environment, cwd=Path(__file__).parents[3])

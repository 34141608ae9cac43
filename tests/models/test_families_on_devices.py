"""Every family on four devices gives the tokens of one, which are Hugging Face's.

Without `-m sweep` one family with latents and one with KV heads and recurrent states; with it all. Windows on four
devices: tests/engine/mesh/test_mesh.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.families import FAMILIES, IN_RINGS, IN_SLABS

PROGRAM = """
import sys
import jax
from kvjax.engine import LLMEngine
from tests.models.families import FAMILIES, IN_RINGS, IN_SLABS, add_golden, drain, engine_config, greedy_params
from tests.models.golden_models import goldens_of, model_folder

family = next(family for family in (*FAMILIES, *IN_SLABS, *IN_RINGS) if family.id == sys.argv[1])
settings = {"num_devices": 4, "dtype": "float32", "streaming": family.streaming}
changes = {"idle_state_dtype": sys.argv[2]} if len(sys.argv) > 2 else {}
engine = LLMEngine.from_folder(model_folder(family.name), engine_config(family, **changes), **settings)
assert all(len(array.sharding.device_set) == 4 for array in jax.tree.leaves(engine._runner.pages))
rounds = [goldens_of(family.name)[:2]] * 2 if changes else [goldens_of(family.name)]
for is_again, prompts in enumerate(rounds):
    goldens = {add_golden(engine, golden, greedy_params()): golden for golden in prompts}
    for request_id, result in drain(engine).items():
        assert result.output_token_ids.tolist() == goldens[request_id].greedy.tolist(), request_id
        assert result.stats.num_cached_tokens or not is_again, request_id
"""
OF_EACH_SORT = frozenset({"deepseek_v4", "qwen3_next"})


@pytest.mark.parametrize(
    "name",
    [
        family.id if family.id in OF_EACH_SORT else pytest.param(family.id, marks=pytest.mark.sweep)
        for family in (*FAMILIES, *IN_SLABS, *IN_RINGS)
        if not family.swept  # their heads do not divide over four, which is refused
    ],
)
def test_four_devices_give_the_same_tokens(name: str) -> None:
    run_on_four(name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_next_in_slabs"])
def test_four_devices_hit_states_of_16_bits(name: str) -> None:
    """Each keeps those of its heads."""
    run_on_four(name, "int16")


def run_on_four(*arguments: str) -> None:
    """Runs the program with these arguments; it compares."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    program = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(
        program,
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]

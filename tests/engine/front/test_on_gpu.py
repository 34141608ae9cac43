"""The engine's greedy tokens on an NVIDIA GPU are those on the CPU: the demo model in float32, as Hugging Face's.

Attention takes the reference there, since kernels have no float32 queries: without a GPU there is nothing to interpret.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels.interpret.on_gpu import gpu_device
from tests.engine.front.greedy_program import greedy_tokens
from tests.models.golden_models import goldens_of

EXPECTED = [golden.greedy.tolist() for golden in goldens_of("demo")]


def test_greedy_tokens_of_the_demo_model_on_the_cpu() -> None:
    assert greedy_tokens() == EXPECTED


@pytest.mark.skipif(gpu_device() is None, reason="this machine has no NVIDIA GPU")
def test_greedy_tokens_of_the_demo_model_on_a_gpu() -> None:
    """In a process of its own, whose default device is the GPU."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.front.greedy_program"],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "JAX_PLATFORMS": "cuda,cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == {"platform": "gpu", "tokens": EXPECTED}

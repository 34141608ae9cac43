"""Projections that stay in eight bits: their product by its definition, what is kept, the model that comes of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.engine import EngineConfig, LLMEngine, SamplingParams
from kvjax.errors import CheckpointError
from kvjax.models import DenseAttention, load_model
from kvjax.models.layers.linear import scaled_matmul
from kvjax.models.save import save_weights
from tests.models.golden_models import model_folder
from tests.models.quantised.checkpoints import write_quantised

GOLDENS = Path(__file__).parent / "goldens"
EIGHT_BITS = {
    "ct_fp8": "float8_e4m3fn",
    "ct_fp8_tensor": "float8_e4m3fn",
    "ct_int8": "int8",
    "fp8_block": "float8_e4m3fn",
}


def projections(module: Any) -> dict[str, Any]:
    """The kernels of a model's linear projections but its head, by path."""
    flat = nnx.to_flat_state(nnx.state(module))
    return {
        ".".join(map(str, path)): param[...] for path, param in flat if path[-1] == "kernel" and path[0] == "layers"
    }


@pytest.mark.parametrize("block", [(1, 1), (5, 7), (8, 4), (20, 12), (20, 1), (32, 32)])
@pytest.mark.parametrize("shape", [(3,), (2, 4)])
def test_a_product_is_that_with_the_scaled_kernel(block: tuple[int, int], shape: tuple[int, ...]) -> None:
    """20 inputs and 12 outputs; blocks may be cut off, or larger than the kernel."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(*shape, 20)).astype(np.float32)
    kernel = random.integers(-128, 128, (20, 12)).astype(np.int8)
    scale = random.uniform(0.5, 2, (-(-20 // block[0]), -(-12 // block[1]))).astype(np.float32)
    scaled = np.empty((20, 12))
    for i, j in np.ndindex(20, 12):
        scaled[i, j] = float(kernel[i, j]) * float(scale[i // block[0], j // block[1]])
    got = jax.jit(scaled_matmul, static_argnums=3)(inputs, kernel, scale, block)
    np.testing.assert_allclose(got, inputs @ scaled, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_projections_stay_as_they_are_stored_and_give_the_golden_tokens(name: str) -> None:
    """Logits differ by the rounding of weights to the dtype of scales, and of sums, only."""
    with np.load(GOLDENS / name / "goldens.npz") as golden:
        prompt, greedy = golden["prompt"], golden["greedy"]
    plain, kept = (load_model(GOLDENS / name, "float32", keep_quantised=keep).module for keep in (False, True))
    kernels = projections(kept)
    assert {str(one.dtype) for path, one in kernels.items() if "gate.kernel" not in path} == {EIGHT_BITS[name]}
    assert {path: one.shape for path, one in kernels.items()} == {p: one.shape for p, one in projections(plain).items()}
    tokens = jnp.asarray(np.append(prompt, greedy[:-1]))
    logits = [np.asarray(one.logits(one(tokens, jnp.arange(tokens.size), DenseAttention()))) for one in (plain, kept)]
    np.testing.assert_allclose(logits[1], logits[0], atol=0.15 if name != "fp8_block" else 1e-4)
    assert logits[1][len(prompt) - 1 :].argmax(-1).tolist() == greedy.tolist()


def test_an_engine_runs_a_model_that_is_kept() -> None:
    with np.load(GOLDENS / "fp8_block" / "goldens.npz") as golden:
        prompt, greedy = golden["prompt"], golden["greedy"]
    model = load_model(GOLDENS / "fp8_block", "float32", keep_quantised=True)
    engine = LLMEngine(model, EngineConfig(num_blocks=40, max_model_len=96, max_num_batched_tokens=64, max_buckets=1))
    (result,) = engine.generate([prompt], SamplingParams(max_tokens=8, temperature=0.0))
    assert list(result.output_token_ids) == greedy[:8].tolist()


MESH_PROGRAM = """
import jax
jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp, numpy as np
from jax.sharding import Mesh
from kvjax.models import DenseAttention, load_model
from tests.models.quantised.test_kept import GOLDENS

mesh = Mesh(np.asarray(jax.devices()), ("tensor",))
tokens = jnp.arange(20)
for name in ("fp8_block", "ct_int8"):
    whole, split = (load_model(GOLDENS / name, "float32", mesh, keep_quantised=True).module for mesh in (None, mesh))
    kernel = split.layers[0].mlp.down_proj.kernel[...]
    assert kernel.addressable_shards[0].data.shape == (kernel.shape[0] // 2, kernel.shape[1])
    logits = [np.asarray(jax.jit(lambda t, m=m: m.logits(m(t, t, DenseAttention())))(tokens)) for m in (whole, split)]
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-4)
"""


def test_kept_projections_are_split_over_devices() -> None:
    """In a process of its own, since the number of CPU devices is set before jax starts."""
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", MESH_PROGRAM], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_cannot_be_kept_is_dequantised() -> None:
    """Experts of one array, beside projections that stay."""
    module: Any = load_model(GOLDENS / "fp8_block", "bfloat16", keep_quantised=True).module
    assert module.layers[1].mlp.experts.gate[...].dtype == jnp.bfloat16
    assert module.layers[1].self_attn.q_proj.kernel[...].dtype == jnp.float8_e4m3fn


@pytest.mark.parametrize("name", ["ct_int4_asymmetric", "ct_int8_packed", "mxfp4"])
def test_a_checkpoint_without_anything_to_keep_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected projections in float8, or in int8 without zero points, to keep"):
        load_model(GOLDENS / name, keep_quantised=True)
    with pytest.raises(ValueError, match="expected projections in float8, or in int8 without zero points, to keep"):
        load_model(model_folder("llama"), keep_quantised=True)


def test_a_kept_number_that_is_none_is_named(tmp_path: Path) -> None:
    weight = np.zeros((96, 64), np.uint8)
    weight[5, 6] = 0xFF
    parts = {".weight": weight.view(jnp.float8_e4m3fn), ".weight_scale_inv": np.ones((3, 2), np.float32)}
    config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    folder = write_quantised(tmp_path, config, parts)
    with pytest.raises(CheckpointError, match=r"expected finite numbers in .*up_proj\.weight, got 1 of 6144 .* float8"):
        load_model(folder, keep_quantised=True)


def test_kept_weights_are_not_saved_without_their_scales(tmp_path: Path) -> None:
    module = load_model(GOLDENS / "ct_int8", keep_quantised=True).module
    with pytest.raises(NotImplementedError, match=r"got layers\.0\.\S+ kept quantised: load the model without keep"):
        save_weights(module, tmp_path)

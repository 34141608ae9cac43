"""Families with recurrent layers: the sizes of their states' blocks, and a hit on a state of the wrong length.

What else they keep, test_families.py says.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from kvjax.core.kinds.retention import Retention
from kvjax.core.kinds.state_steps import StateSteps
from kvjax.models import ModelConfig, build_model, load_model
from tests.models.families import FAMILIES, Family, add_golden, assert_golden, drain, greedy_params, make_engine
from tests.models.golden_models import goldens_of, model_folder

# Bytes of a state over those of a token's K and V, in whole blocks of 8 tokens; float32.
STATE_BLOCKS = {
    # 64 channels * (3 + 8), 4 heads * (4 + 4)
    "jamba": 24,
    # (128 + 2 * 2 * 16) * 3 + 8 heads * 16 * 16, 4 heads * (8 + 8)
    "granite_moe_hybrid": 48,
    # (2 * 4 + 8) * 8 * 3 + 8 heads * 8 * 8, 4 heads * (16 + 16)
    "qwen3_next": 8,
    "qwen3_5": 8,
    # 3 * 4 heads * 16 * 3 + 4 heads * 16 * 16, 32 + 8
    "kimi_linear": 40,
    # (64 + 2 * 2 * 16) * 3 + 8 heads * 8 * 16, 4 heads * (16 + 16)
    "nemotron_h": 16,
    # 48 * 2, 4 heads * (4 + 4)
    "lfm2": 8,
    # 40 * 4, 2 heads * (10 + 10)
    "lfm2_moe": 8,
    # 48 * 3, 2 heads * (6 + 6)
    "lfm3": 8,
    # 40 * 2, 4 heads * (10 + 10)
    "lfm3_odd": 8,
    # (96 + 2 * 4 * 10) * 2 + 12 heads * 8 * 10, 2 * 48
    "mamba2": 16,
    # (120 + 2 * 7) * 3 + 20 heads * 6 * 7, 2 * 40
    "mamba2_odd": 16,
    # (64 + 2 * 2 * 12) * 3 + 8 heads * 8 * 12, 4 heads * (4 + 4)
    "falcon_h1": 40,
    # (72 + 2 * 9) * 2 + 12 heads * 6 * 9, 2 heads * (10 + 10)
    "falcon_h1_odd": 24,
    # (2 * 4 * 6 + 8 * 10) * 3 + 8 heads * 6 * 10, 4 heads * (4 + 4)
    "olmo_hybrid": 32,
    # (2 * 4 * 7 + 4 * 14) * 2 + 4 heads * 7 * 14, 2 heads * (10 + 10)
    "olmo_hybrid_odd": 16,
}
RECURRENT = [family for family in FAMILIES if family.name in STATE_BLOCKS]
each_family = pytest.mark.parametrize("family", RECURRENT, ids=lambda family: family.name)
BUDGET = 61  # of a step; no whole blocks of states


@each_family
def test_a_block_of_states_is_worth_the_attention_of_its_tokens(family: Family) -> None:
    groups = make_engine(family).plan.config.kv_cache_groups
    states = [group for group in groups if group.kv_cache_spec.state_pages is not None]
    assert {group.kv_cache_spec.block_size for group in states} == {STATE_BLOCKS[family.name]}
    assert len({group.pool_id for group in groups}) == (2 if len(states) < len(groups) else 1)


def run_twice(family: Family) -> None:
    """A prompt, then the same with a hit: both give the golden's logits."""
    engine = make_engine(family, max_num_seqs=1, max_num_batched_tokens=BUDGET)
    golden = goldens_of(family.name)[2]
    for is_hit in (False, True):
        request_id = add_golden(engine, golden, greedy_params())
        result = drain(engine)[request_id]
        assert (result.stats.num_cached_tokens > 0) == is_hit
        assert_golden(engine, golden, result)


@each_family
def test_a_state_of_the_wrong_length_is_caught(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that do not end where a block of states ends leave it with the state of fewer tokens than it stands for."""
    run_twice(family)
    monkeypatch.setattr(StateSteps, "limit", lambda self, num_computed, num_new, num_tokens: num_new)
    monkeypatch.setattr(StateSteps, "check_step_ends", lambda self, num_computed, after: None)
    monkeypatch.setattr(Retention, "step_end", lambda self, start, end, lengths: end)
    with pytest.raises(AssertionError, match=r"Not equal to tolerance|Arrays are not equal"):
        run_twice(family)


class ShapesOnly:
    """A cache that gives outputs of the right shapes and dtypes, to trace layers without kernels."""

    backend = "reference"

    def __call__(self, layer_name: str, q: jax.Array, k: jax.Array, v: jax.Array, options: Any) -> jax.Array:
        return jnp.zeros((*q.shape[:2], v.shape[2]), q.dtype)

    def attend_latent(self, layer_name: str, q_nope: jax.Array, *others: Any) -> jax.Array:
        return jnp.zeros_like(q_nope)

    def ring_sizes(self, layer_name: str) -> None:
        """States have no rings."""

    def update_states(
        self, layer_name: str, update: Any, inputs: Sequence[jax.Array], *args: Any, **kwargs: Any
    ) -> jax.Array:
        """As x of a convolution or scan, or as v of the delta rule, which comes after q and k."""
        return jnp.zeros_like(inputs[2] if len(inputs) == 5 else inputs[0])


@each_family
def test_strict_promotion_of_dtypes_and_ranks_is_enough(family: Family) -> None:
    config = ModelConfig.from_folder(model_folder(family.name))

    def forward(token_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        module = build_model(config, dtype="bfloat16", rngs=nnx.Rngs(0))
        hidden = module(token_ids, jnp.arange(20), ShapesOnly())
        return hidden, module.logits(hidden)

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        hidden, logits = jax.eval_shape(forward, jnp.arange(20))
    assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)


def test_experts_load_from_a_tensor_each_or_from_one_of_all(tmp_path: Path) -> None:
    """Checkpoints of Qwen3.5 have `gate_up_proj` [E, 2 * inner, d] and `down_proj` [E, d, inner] of all experts."""
    source = model_folder("qwen3_next")
    tensors = load_file(source / "model.safetensors")
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts."
        parts = {n: [tensors.pop(f"{prefix}{e}.{n}_proj.weight") for e in range(8)] for n in ("gate", "up", "down")}
        tensors[f"{prefix}gate_up_proj"] = np.concatenate([np.stack(parts["gate"]), np.stack(parts["up"])], axis=1)
        tensors[f"{prefix}down_proj"] = np.stack(parts["down"])
    shutil.copy(source / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    apart, as_one = (nnx.state(load_model(folder).module) for folder in (source, tmp_path))
    chex.assert_trees_all_equal(apart, as_one)

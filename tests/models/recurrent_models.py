"""Small models with recurrent layers, of random weights, and the step that serves them.

for name in MODELS: serve(name)              # a Server without requests; its compiled step is shared
STATE_BLOCK[name]                            # tokens between states that can be hit
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.device import Bucket, Buckets, UpdateStep, make_update_step
from kvjax.models import Decoder, ModelConfig, build_model
from kvjax.planning import plan_kv_cache
from tests.device.serving import Server

BLOCK_SIZE = 8
MAX_MODEL_LEN = 64
VOCAB = 64
_BUCKETS = Buckets((Bucket(56, 3, MAX_MODEL_LEN // BLOCK_SIZE),))
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "granite_moe_hybrid": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 6,
        "num_local_experts": 4,
        "shared_intermediate_size": 12,
        "embedding_multiplier": 3,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "logits_scaling": 2,
    },
    "jamba": {
        "architectures": ["JambaForCausalLM"],
        "num_hidden_layers": 3,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 6,
    },
}
# The fewest whole blocks of attention that hold as many bytes as a state, from the sizes above.
STATE_BLOCK = {"granite_moe_hybrid": 24, "jamba": 24}


def config_dict(name: str, **changes: Any) -> dict[str, Any]:
    """config.json of a small model; a change to `...` removes the key."""
    return {key: value for key, value in (_COMMON | MODELS[name] | changes).items() if value is not ...}


def random_model(name: str) -> Decoder:
    """With weights drawn by numpy, which compiles nothing."""
    config = ModelConfig.from_dict(config_dict(name))
    rng = np.random.default_rng(0)
    graph, state = nnx.split(nnx.eval_shape(lambda: build_model(config, rngs=nnx.Rngs(0))))
    return nnx.merge(graph, jax.tree.map(lambda x: jnp.asarray(_weight(rng, x.shape), x.dtype), state))


def _weight(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Matrices that keep the variance of their input, vectors around 1."""
    noise = rng.standard_normal(shape)
    return 1.0 + 0.2 * noise if len(shape) == 1 else noise * shape[-2] ** -0.5


@functools.cache
def step_of(name: str) -> UpdateStep:
    """The compiled step of a small model, over pools of some size."""
    module = random_model(name)
    plan = plan_kv_cache(
        module.config.kv_cache_specs(BLOCK_SIZE),
        num_blocks=[60, 200],
        max_model_len=MAX_MODEL_LEN,
        max_in_flight_tokens=_BUCKETS.max_num_tokens,
    )
    return make_update_step(module, plan.config, _BUCKETS)


def serve(name: str) -> Server:
    """A server of a small model, without requests."""
    return Server(step_of(name), BLOCK_SIZE, MAX_MODEL_LEN)

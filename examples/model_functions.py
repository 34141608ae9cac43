"""A decoder of plain functions over a dict of weights, served by the loop of `serving_loop.py`.

    python examples/model_functions.py          writes tokens of three prompts with random weights

Flow:    weights, forward, head -> [FunctionModel] -> [make_update_step] -> [Server] -> tokens
"""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp
from serving_loop import BLOCK_SIZE, MAX_IN_FLIGHT, MAX_MODEL_LEN, MAX_STEP_TOKENS, Server

from kvjax.core import FullAttentionSpec, KVCacheSpec
from kvjax.device import AttentionOptions, FunctionModel, StepCache
from kvjax.planning import plan_kv_cache

VOCAB, DIM, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 97, 64, 4, 2, 16, 2
SHAPES = {
    "qkv": (DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
    "out": (HEADS * HEAD_DIM, DIM),
    "up": (DIM, 2 * DIM),
    "down": (2 * DIM, DIM),
}
Weights: TypeAlias = dict[str, jax.Array]  # layers are stacked: [LAYERS, ...]


def init(key: jax.Array) -> Weights:
    """Random weights."""
    keys = iter(jax.random.split(key, 3 + len(SHAPES)))
    layers = {
        name: jax.random.normal(next(keys), (LAYERS, *shape)) * shape[0] ** -0.5 for name, shape in SHAPES.items()
    }
    tables = {"tokens": (VOCAB, DIM), "places": (MAX_MODEL_LEN, DIM), "head": (DIM, VOCAB)}
    return layers | {name: jax.random.normal(next(keys), shape) for name, shape in tables.items()}


def normed(x: jax.Array) -> jax.Array:
    """`x` with a root mean square of 1 over its last axis."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def forward(weights: Weights, token_ids: jax.Array, positions: jax.Array, cache: StepCache) -> jax.Array:
    """Hidden states [T, DIM] of a step's tokens; each layer writes and reads its own pages."""
    hidden = weights["tokens"][token_ids] + weights["places"][positions]
    for i in range(LAYERS):
        heads = (normed(hidden) @ weights["qkv"][i]).reshape(-1, HEADS + 2 * KV_HEADS, HEAD_DIM)
        q, k, v = jnp.split(heads, [HEADS, HEADS + KV_HEADS], axis=1)
        attended = cache(f"layers.{i}", q, k, v, AttentionOptions(sm_scale=HEAD_DIM**-0.5))
        hidden = hidden + attended.reshape(-1, HEADS * HEAD_DIM) @ weights["out"][i]
        hidden = hidden + jax.nn.silu(normed(hidden) @ weights["up"][i]) @ weights["down"][i]
    return normed(hidden)


def head(weights: Weights, hidden: jax.Array) -> jax.Array:  # [N, DIM] -> [N, VOCAB]
    """Logits of some hidden states."""
    return hidden @ weights["head"]


def kv_cache_specs() -> dict[str, KVCacheSpec]:
    """What each layer keeps of a token."""
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_size=HEAD_DIM, dtype="float32")
    return {f"layers.{i}": spec for i in range(LAYERS)}


def main() -> None:
    """Writes tokens of three prompts."""
    in_flight = MAX_IN_FLIGHT * MAX_STEP_TOKENS
    config = plan_kv_cache(
        kv_cache_specs(), num_blocks=100, max_model_len=MAX_MODEL_LEN, max_in_flight_tokens=in_flight
    ).config
    server = Server(FunctionModel(init(jax.random.key(0)), forward, head), config, eos_token_ids=())
    for name, prompt in {"short": [5, 7, 11], "same": [13] * 20, "long": list(range(90))}.items():
        server.add(name, prompt, max_tokens=12)
    for name, tokens in sorted(server.serve().items()):
        print(name, *tokens)


if __name__ == "__main__":
    main()

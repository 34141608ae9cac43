"""A decoder in Equinox under kvjax's update step, served by the loop of `serving_loop.py`.

    pip install equinox && python examples/model_equinox.py          writes tokens of three prompts with random weights

Flow:    eqx.Module -> [make_update_step] (its arrays are weights, the rest constants) -> [Server] -> tokens

Any pytree that can be called, and has `logits`, is a model: nothing of Equinox is known to kvjax.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from serving_loop import BLOCK_SIZE, MAX_IN_FLIGHT, MAX_MODEL_LEN, MAX_STEP_TOKENS, Server

from kvjax.core import FullAttentionSpec, KVCacheSpec
from kvjax.device import AttentionOptions, StepCache
from kvjax.planning import plan_kv_cache

VOCAB, DIM, HEADS, HEAD_DIM, LAYERS = 97, 64, 4, 16, 2


class Attention(eqx.Module):
    """Causal attention of one layer; Equinox maps its linear layers over the tokens of the step."""

    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    name: str = eqx.field(static=True)

    def __init__(self, name: str, key: jax.Array) -> None:
        qkv_key, out_key = jax.random.split(key)
        self.name = name
        self.qkv = eqx.nn.Linear(DIM, 3 * HEADS * HEAD_DIM, key=qkv_key)
        self.out = eqx.nn.Linear(HEADS * HEAD_DIM, DIM, key=out_key)

    def __call__(self, hidden: jax.Array, cache: StepCache) -> jax.Array:  # [T, DIM] -> [T, DIM]
        """One step's tokens through the layer."""
        q, k, v = jnp.split(jax.vmap(self.qkv)(hidden).reshape(-1, 3 * HEADS, HEAD_DIM), 3, axis=1)
        attended = cache(self.name, q, k, v, AttentionOptions(sm_scale=HEAD_DIM**-0.5))
        return jax.vmap(self.out)(attended.reshape(-1, HEADS * HEAD_DIM))


class Decoder(eqx.Module):
    """Layers of attention and a feed-forward over learned positions."""

    tokens: eqx.nn.Embedding
    places: eqx.nn.Embedding
    attention: list[Attention]
    feed_forward: list[eqx.nn.MLP]
    norms: list[eqx.nn.RMSNorm]
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 3 + 2 * LAYERS)
        self.tokens = eqx.nn.Embedding(VOCAB, DIM, key=keys[0])
        self.places = eqx.nn.Embedding(MAX_MODEL_LEN, DIM, key=keys[1])
        self.attention = [Attention(f"layers.{i}", keys[2 + i]) for i in range(LAYERS)]
        self.feed_forward = [eqx.nn.MLP(DIM, DIM, 2 * DIM, depth=1, key=keys[2 + LAYERS + i]) for i in range(LAYERS)]
        self.norms = [eqx.nn.RMSNorm(DIM) for _ in range(2 * LAYERS)]
        self.head = eqx.nn.Linear(DIM, VOCAB, key=keys[-1])

    def __call__(self, token_ids: jax.Array, positions: jax.Array, cache: StepCache) -> jax.Array:  # [T, DIM]
        """Hidden states of one step's tokens."""
        hidden = jax.vmap(self.tokens)(token_ids) + jax.vmap(self.places)(positions)
        for i in range(LAYERS):
            hidden = hidden + self.attention[i](jax.vmap(self.norms[2 * i])(hidden), cache)
            hidden = hidden + jax.vmap(self.feed_forward[i])(jax.vmap(self.norms[2 * i + 1])(hidden))
        return hidden

    def logits(self, hidden: jax.Array) -> jax.Array:  # [N, DIM] -> [N, VOCAB]
        """Logits of some hidden states."""
        return jax.vmap(self.head)(hidden)


def kv_cache_specs() -> dict[str, KVCacheSpec]:
    """What each layer keeps of a token."""
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=HEADS, head_size=HEAD_DIM, dtype="float32")
    return {f"layers.{i}": spec for i in range(LAYERS)}


def main() -> None:
    """Writes tokens of three prompts."""
    in_flight = MAX_IN_FLIGHT * MAX_STEP_TOKENS
    config = plan_kv_cache(
        kv_cache_specs(), num_blocks=100, max_model_len=MAX_MODEL_LEN, max_in_flight_tokens=in_flight
    ).config
    server = Server(Decoder(jax.random.key(0)), config, eos_token_ids=())
    for name, prompt in {"short": [5, 7, 11], "same": [13] * 20, "long": list(range(90))}.items():
        server.add(name, prompt, max_tokens=12)
    for name, tokens in sorted(server.serve().items()):
        print(name, *tokens)


if __name__ == "__main__":
    main()

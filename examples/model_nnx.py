"""A decoder in Flax NNX whose pages are a module too: `kvjax.nnx.PagedKVCache` in a step function of your own.

    python examples/model_nnx.py          writes tokens of three prompts with random weights

Flow:    prompts -> [generate]: slots, plan; [forward] under nnx.jit with the cache donated; append, free -> tokens

Layers alternate between full attention and a window; the planner puts them into two groups of one pool. The model calls
`attend(layer, q, k, v, options)` where attention happens, and knows nothing of pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.core import FullAttentionSpec, KVCacheManager, KVCacheSpec, Request, SlidingWindowSpec, build_step_plan
from kvjax.device import AttentionOptions, Buckets, DeviceBatch, StepCache
from kvjax.nnx import PagedKVCache
from kvjax.planning import plan_kv_cache

VOCAB, DIM, HEADS, KV_HEADS, HEAD_DIM, WINDOW, BLOCK_SIZE = 97, 64, 4, 2, 16, 8, 4
MAX_SEQS, MAX_STEP_TOKENS, MAX_MODEL_LEN = 4, 64, 64
WINDOWS = {"layers.0": None, "layers.1": WINDOW}


class Layer(nnx.Module):
    """Attention and a feed-forward, each added to what came in."""

    def __init__(self, name: str, rngs: nnx.Rngs) -> None:
        self.name = name
        self.options = AttentionOptions(sm_scale=HEAD_DIM**-0.5, sliding_window=WINDOWS[name])
        self.norms = nnx.List([nnx.RMSNorm(DIM, rngs=rngs) for _ in range(2)])
        self.qkv = nnx.Linear(DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM, rngs=rngs)
        self.out = nnx.Linear(HEADS * HEAD_DIM, DIM, rngs=rngs)
        self.up, self.down = nnx.Linear(DIM, 2 * DIM, rngs=rngs), nnx.Linear(2 * DIM, DIM, rngs=rngs)

    def __call__(self, hidden: jax.Array, attend: StepCache) -> jax.Array:  # [T, DIM] -> [T, DIM]
        """One step's tokens through the layer."""
        heads = self.qkv(self.norms[0](hidden)).reshape(-1, HEADS + 2 * KV_HEADS, HEAD_DIM)
        q, k, v = jnp.split(heads, [HEADS, HEADS + KV_HEADS], axis=1)
        hidden = hidden + self.out(attend(self.name, q, k, v, self.options).reshape(-1, HEADS * HEAD_DIM))
        return hidden + self.down(nnx.gelu(self.up(self.norms[1](hidden))))


class Decoder(nnx.Module):
    """Two layers over learned positions."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.tokens, self.places = nnx.Embed(VOCAB, DIM, rngs=rngs), nnx.Embed(MAX_MODEL_LEN, DIM, rngs=rngs)
        self.layers = nnx.List([Layer(name, rngs) for name in WINDOWS])
        self.norm, self.head = nnx.RMSNorm(DIM, rngs=rngs), nnx.Linear(DIM, VOCAB, rngs=rngs)

    def __call__(self, token_ids: jax.Array, positions: jax.Array, attend: StepCache) -> jax.Array:  # [T, DIM]
        """Hidden states of one step's tokens."""
        hidden = self.tokens(token_ids) + self.places(positions)
        for layer in self.layers:
            hidden = layer(hidden, attend)
        return self.norm(hidden)

    def logits(self, hidden: jax.Array) -> jax.Array:  # [N, DIM] -> [N, VOCAB]
        """Logits of some hidden states."""
        return self.head(hidden)


@partial(nnx.jit, donate_argnums=1)
def forward(model: Decoder, cache: PagedKVCache, batch: DeviceBatch) -> jax.Array:  # int32[N]
    """The best next token of each request of a step; writes the pages of `cache` in place."""
    with cache.step(batch) as attend:
        hidden = model(jnp.asarray(batch.token_ids), jnp.asarray(batch.positions), attend)
    return jnp.argmax(model.logits(hidden[jnp.asarray(batch.logits_indices)]), axis=-1)


def kv_cache_specs() -> dict[str, KVCacheSpec]:
    """What each layer keeps of a token."""
    sizes = {"block_size": BLOCK_SIZE, "num_kv_heads": KV_HEADS, "head_size": HEAD_DIM, "dtype": "float32"}
    return {
        name: FullAttentionSpec(**sizes) if window is None else SlidingWindowSpec(**sizes, sliding_window=window)
        for name, window in WINDOWS.items()
    }


def generate(model: Decoder, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Greedy tokens of at most MAX_SEQS prompts, all of them in every step."""
    limits = {"max_model_len": MAX_MODEL_LEN, "block_size": BLOCK_SIZE}
    config = plan_kv_cache(
        kv_cache_specs(), num_blocks=100, max_model_len=MAX_MODEL_LEN, max_in_flight_tokens=MAX_STEP_TOKENS
    ).config
    manager = KVCacheManager(config, MAX_MODEL_LEN, BLOCK_SIZE)
    buckets = Buckets.default(max_num_batched_tokens=MAX_STEP_TOKENS, max_num_seqs=MAX_SEQS, **limits, max_buckets=2)
    cache = PagedKVCache(config)
    requests = [Request(str(i), prompt) for i, prompt in enumerate(prompts)]
    for _ in range(max_tokens):
        num_new = np.array([request.num_tokens - request.num_computed_tokens for request in requests])
        for request, count in zip(requests, num_new.tolist(), strict=True):
            assert manager.allocate_slots(request, count) is not None
        plan = build_step_plan(manager, np.array([request.row for request in requests]), num_new)
        tokens = np.asarray(forward(model, cache, cache.load(plan, buckets)))
        for request, count, token in zip(requests, num_new.tolist(), tokens.tolist(), strict=False):
            request.num_computed_tokens += count
            request.append_output_token_ids(token)
    for request in requests:
        manager.free(request)
    manager.check_invariants()
    return [request.output_token_ids.tolist() for request in requests]


def main() -> None:
    """Writes tokens of three prompts."""
    for tokens in generate(Decoder(nnx.Rngs(0)), [[5, 7, 11], [13] * 20, list(range(30))], max_tokens=12):
        print(*tokens)


if __name__ == "__main__":
    main()

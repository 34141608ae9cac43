"""How far logits move where a prefix hit starts from recurrent states that were kept in fewer bits.

    python -m scripts.lab.idle_states tests/models/goldens/qwen3_next --lengths 40 200 480
        -> a line of JSON for each form: what logits differ by, in the median of the prompts and at most
    python -m scripts.lab.idle_states --heads 32 --tokens 4096
        -> the same of random heads, of 128 x 128 under the delta rule and of 64 x 128 of Mamba 2: what the outputs
           differ by, as a share of the largest

Flow:    a prompt, computed -> cached states -> fewer bits and back -> the prompt again, from a hit -> its first logits

Forms: integers with a scale for each head, each row of a head's matrix or each column, and bfloat16.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Form = Callable[[jax.Array], jax.Array]  # float32[pages, heads, ...] -> what comes back of it


def _scaled(bits: int, axes_of: Callable[[int], tuple[int, ...]]) -> Form:
    """Integers of so many bits; numbers that differ in these axes alone share a scale."""
    largest = 2 ** (bits - 1) - 1

    def form(states: jax.Array) -> jax.Array:
        most = jnp.abs(states).max(axes_of(states.ndim), keepdims=True)
        steps = jnp.maximum(most, 1e-30) / largest
        return (jnp.round(states / steps) * steps).astype(states.dtype)

    return form


def _whole_head(ndim: int) -> tuple[int, ...]:
    return tuple(range(2, ndim))


FORMS: dict[str, Form] = {
    "int8 a head": _scaled(8, _whole_head),
    "int8 a row": _scaled(8, lambda ndim: (ndim - 1,)),
    "int8 a column": _scaled(8, lambda _: (2,)),
    "int16 a head": _scaled(16, _whole_head),
    "bfloat16": lambda states: states.astype(jnp.bfloat16).astype(states.dtype),
}


def report(what: dict[str, Any], form: str, differences: Sequence[float]) -> None:
    """Prints one line."""
    found = {"median": f"{np.median(differences):.1e}", "most": f"{max(differences):.1e}"}
    print(json.dumps({**what, "form": form, **found}), flush=True)


def report_model(folder: Path, lengths: Sequence[int], prompts_each: int, block_size: int = 8) -> None:
    """Differences of the first logits behind a hit, of random prompts of these lengths."""
    from kvjax.engine import EngineConfig, LLMEngine, SamplingParams
    from kvjax.engine.sampling.sampler import sample
    from kvjax.models import load_model

    logits: list[np.ndarray] = []

    def sample_and_record(rows: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
        tokens = sample(rows, batch)
        jax.debug.callback(lambda found: logits.append(np.asarray(found[0])), rows, ordered=True)
        return tokens.token_ids, tokens.logprobs

    config = EngineConfig(
        block_size=block_size,
        num_blocks=400,
        max_model_len=max(lengths) + 8,
        max_num_batched_tokens=max(lengths) + 8,
        max_num_seqs=1,
        max_buckets=1,
        one_memory=False,
        async_scheduling=False,
    )
    engine = LLMEngine(load_model(folder, "float32"), config, sample_fn=sample_and_record)
    groups = engine.manager.kv_cache_config.kv_cache_groups
    pools = {group.pool_id for group in groups if group.kv_cache_spec.state_pages is not None}
    rng, one_token = np.random.default_rng(0), SamplingParams(max_tokens=1, temperature=0.0)

    def first_logits(prompt: list[int], kept: Any, form: Form | None) -> np.ndarray:
        pages = jax.tree.map(jnp.copy, kept)
        for pool_id in pools if form is not None else ():
            for place, column in enumerate(pages.pools[pool_id]):
                pages = pages.with_column(pool_id, place, (*column[:-1], form(column[-1])))
        engine._runner.pages = pages
        logits.clear()
        (result,) = engine.generate([prompt], one_token)
        assert result.stats.num_cached_tokens, "expected a hit"
        jax.effects_barrier()
        return logits[-1]

    differences: dict[str, list[float]] = {form: [] for form in FORMS}
    for length in [each for each in lengths for _ in range(prompts_each)]:
        prompt = rng.integers(1, 250, length).tolist()
        engine.generate([prompt], one_token)
        kept = engine._runner.pages
        exact = first_logits(prompt, kept, None)
        for form, function in FORMS.items():
            differences[form].append(float(np.abs(first_logits(prompt, kept, function) - exact).max()))
    for form, found in differences.items():
        report({"model": folder.name, "largest logit": round(float(np.abs(exact).max()), 1)}, form, found)


def report_heads(num_heads: int, num_tokens: int) -> None:
    """Differences of the outputs of 64 tokens behind a state of `num_tokens`, as a share of the largest output."""
    keys = jax.random.split(jax.random.key(0), 8)
    steps = jnp.exp(jax.random.uniform(keys[0], (num_heads,), minval=jnp.log(1e-3), maxval=jnp.log(1e-1)))
    rates = jax.random.uniform(keys[1], (num_heads,), minval=1.0, maxval=16.0)  # Mamba's first values
    decay = jnp.exp(-rates * steps)

    def inputs(key: jax.Array, dim: int) -> jax.Array:
        found = jax.random.normal(key, (num_tokens + 64, num_heads, dim))
        return found / jnp.linalg.norm(found, axis=-1, keepdims=True)

    q, k, v = inputs(keys[2], 128), inputs(keys[3], 128), 11 * inputs(keys[4], 128)
    beta = jax.nn.sigmoid(jax.random.normal(keys[5], (num_tokens + 64, num_heads)))

    def delta(state: jax.Array, token: Any) -> tuple[jax.Array, jax.Array]:  # state [heads, keys, values]
        q, k, v, beta = token
        state = state * decay[:, None, None]
        rest = v - jnp.einsum("hkv,hk->hv", state, k)
        state = state + jnp.einsum("hk,hv->hkv", k, beta[:, None] * rest)
        return state, jnp.einsum("hkv,hk->hv", state, q)

    def mamba(state: jax.Array, token: Any) -> tuple[jax.Array, jax.Array]:  # state [heads, channels, numbers]
        c, b, x, _ = token
        state = state * decay[:, None, None] + jnp.einsum("hp,hn->hpn", steps[:, None] * x[:, :64], b)
        return state, jnp.einsum("hpn,hn->hp", state, c)

    for name, rule, shape in (("delta rule", delta, (128, 128)), ("mamba 2", mamba, (64, 128))):
        tokens = (q, k, v, beta)
        before, behind = (jax.tree.map(lambda x, part=part: x[part], tokens) for part in (slice(-64), slice(-64, None)))
        state, _ = jax.lax.scan(rule, jnp.zeros((num_heads, *shape)), before)
        _, exact = jax.lax.scan(rule, state, behind)
        for form, function in FORMS.items():
            _, found = jax.lax.scan(rule, function(state[None])[0], behind)
            share = jnp.abs(found - exact).max((0, 2)) / jnp.abs(exact).max((0, 2))
            report({"heads": name, "tokens": num_tokens}, form, share.tolist())


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="of models, as `load_model` takes them")
    parser.add_argument("--lengths", nargs="+", type=int, default=[40, 200, 480], help="tokens of prompts")
    parser.add_argument("--prompts", type=int, default=4, help="prompts of each length")
    parser.add_argument("--heads", type=int, default=0, help="random heads")
    parser.add_argument("--tokens", type=int, default=4096, help="that made their states")
    arguments = parser.parse_args()
    for folder in arguments.folders:
        report_model(folder, arguments.lengths, arguments.prompts)
    if arguments.heads:
        report_heads(arguments.heads, arguments.tokens)


if __name__ == "__main__":
    main()

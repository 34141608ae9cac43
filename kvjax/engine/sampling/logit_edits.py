"""What requests change in their logits before a token is chosen: biases, penalties, masks.

Flow:    logits, lines of SamplerArrays -> [edited_logits] -> sampler
Source:  presence and frequency penalty: OpenAI's API reference, as vLLM has them; repetition penalty: CTRL (Keskar et
         al., 2019, arXiv 1909.05858), over prompt and output; order of the three parts: vLLM

Each part is skipped at run time where no row asks for it. Penalties cost in proportion to the longest of the rows that
have them: tokens are counted `TOKEN_COLUMNS` places at a time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.engine.sampling.sampler_state import TOKEN_COLUMNS, SamplerArrays


def edited_logits(
    logits: jax.Array,  # float32[N, V]
    lines: jax.Array,  # int32[N] of `state`, 0: the row asks nothing
    positions: jax.Array,  # int32[N] place of the token to sample in its sequence
    state: SamplerArrays,
) -> jax.Array:  # float32[N, V]
    """Logits from which to choose; -inf for tokens that are never chosen."""
    logits = _if_any(state.edit_ids[lines, 0] >= 0, lambda x: _biased(x, lines, positions, state), logits)
    logits = _if_any(_is_penalised(lines, state), lambda x: _penalised(x, lines, positions, state), logits)
    return _if_any(state.has_mask[lines], lambda x: _masked(x, lines, state), logits)


def _if_any(rows: jax.Array, edit: object, logits: jax.Array) -> jax.Array:
    return jax.lax.cond(jnp.any(rows), edit, lambda x: x, logits)  # type: ignore[arg-type]


def _biased(logits: jax.Array, lines: jax.Array, positions: jax.Array, state: SamplerArrays) -> jax.Array:
    ids = state.edit_ids[lines]
    is_added = (ids >= 0) & (positions[:, None] < state.edit_end[lines])
    return logits.at[_rows(logits), jnp.where(is_added, ids, logits.shape[-1])].add(state.edit_bias[lines], mode="drop")


def _is_penalised(lines: jax.Array, state: SamplerArrays) -> jax.Array:  # bool[N]
    presence, frequency, repetition, _ = state.values[lines].T
    return (presence != 0) | (frequency != 0) | (repetition != 1)


def _penalised(logits: jax.Array, lines: jax.Array, positions: jax.Array, state: SamplerArrays) -> jax.Array:
    presence, frequency, repetition, _ = state.values[lines].T[:, :, None]
    counts, is_seen = _count_tokens(logits, lines, positions, state)
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(is_seen, repeated, logits)
    return logits - frequency * counts.astype(jnp.float32) - presence * (counts > 0).astype(jnp.float32)


def _count_tokens(
    logits: jax.Array, lines: jax.Array, positions: jax.Array, state: SamplerArrays
) -> tuple[jax.Array, jax.Array]:  # int32[N, V], bool[N, V]
    """How often each token is in a row's output, and whether it is in prompt or output; 0 of rows without penalties."""
    rows, vocab_size = _rows(logits), logits.shape[-1]
    ends = jnp.where(_is_penalised(lines, state), positions, 0)[:, None]
    starts = state.num_prompt_tokens[lines][:, None]

    def count(i: jax.Array, counts: jax.Array) -> jax.Array:  # int32[N, 2 V] of the prompt, of the output
        first = i * TOKEN_COLUMNS
        columns = jax.lax.dynamic_slice_in_dim(state.token_ids, first, TOKEN_COLUMNS, axis=1)
        tokens, places = columns[lines], (first + jnp.arange(TOKEN_COLUMNS, dtype=jnp.int32))[None]
        index = jnp.where(places >= starts, tokens + vocab_size, tokens)
        return counts.at[rows, jnp.where(places < ends, index, 2 * vocab_size)].add(1, mode="drop")

    num_pieces = (jnp.max(ends) + TOKEN_COLUMNS - 1) // TOKEN_COLUMNS
    nothing = jnp.zeros((logits.shape[0], 2 * vocab_size), jnp.int32)
    counts = jax.lax.fori_loop(jnp.zeros_like(num_pieces), num_pieces, count, nothing)
    in_prompt, in_output = counts[:, :vocab_size], counts[:, vocab_size:]
    return in_output, (in_prompt + in_output) > 0


def _masked(logits: jax.Array, lines: jax.Array, state: SamplerArrays) -> jax.Array:
    words = state.masks[lines]
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None]) & 1
    is_allowed = bits.reshape(len(words), -1)[:, : logits.shape[-1]] > 0
    return jnp.where(is_allowed | ~state.has_mask[lines][:, None], logits, -jnp.inf)


def _rows(logits: jax.Array) -> jax.Array:  # int32[N, 1]
    return jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]


__all__ = ["edited_logits"]

"""The sampler's state on the device: what rare requests ask of it, and the tokens that penalties count.

Flow:    SamplerWrites (numpy) -> [SamplerState] -> SamplerArrays -> update step -> sampler (jit)

The shapes are fixed, so steps with and without such requests are the same program. Lines, masks and tokens are written
by small programs of their own, which donate what they write; a step in flight reads what was there when it was
dispatched. Memory is `num_lines * (4 * num_tokens + vocab_size / 8 + 6 KiB)` bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.device import Placement
from kvjax.device.mesh.transfers import hands_over
from kvjax.engine.sampling.sampler_lines import MAX_EDITS, LineWrite, SamplerSizes, SamplerWrites, TokenWrites

PIECE_LINES = 8  # lines or masks written at once
PIECE_TOKENS = (64, 1024)  # tokens written at once
TOKEN_COLUMNS = 256  # tokens of a line that are counted at once


class SamplerArrays(NamedTuple):
    """The state as the step takes it; line 0 changes nothing. A pytree of arrays."""

    values: jax.Array  # float32[R, 4] presence, frequency and repetition penalty, min_p
    num_prompt_tokens: jax.Array  # int32[R]
    has_mask: jax.Array  # bool[R]
    wants_best: jax.Array  # bool[R]
    edit_ids: jax.Array  # int32[R, MAX_EDITS] -1 behind the last
    edit_bias: jax.Array  # float32[R, MAX_EDITS]
    edit_end: jax.Array  # int32[R, MAX_EDITS] place of the sampled token from which on it is not added
    masks: jax.Array  # int32[R, W]
    token_ids: jax.Array  # int32[R, L rounded up to TOKEN_COLUMNS] by place


class _LineArrays(NamedTuple):
    """Lines to be written; those of number R are not."""

    line: np.ndarray  # int32[PIECE_LINES]
    values: np.ndarray
    num_prompt_tokens: np.ndarray
    has_mask: np.ndarray
    wants_best: np.ndarray
    edit_ids: np.ndarray
    edit_bias: np.ndarray
    edit_end: np.ndarray


class SamplerState:
    """The state of one engine, whole on every device of its placement. Owned by one thread.

    `arrays` are others after each write.
    """

    def __init__(self, sizes: SamplerSizes, placement: Placement) -> None:
        self.sizes = sizes
        self._no_previous = jax.device_put(np.zeros(1, np.int32), placement.replicated)
        make = jax.jit(partial(_empty, sizes), out_shardings=placement.replicated)
        self.arrays: SamplerArrays = make()

    @hands_over
    def write(self, writes: SamplerWrites, previous: jax.Array) -> None:  # int32[n] sampled by the step before
        """Dispatches the writes; a program for each piece."""
        for i in range(0, len(writes.lines), PIECE_LINES):
            self._write_lines(writes.lines[i : i + PIECE_LINES])
        for i in range(0, len(writes.masks), PIECE_LINES):
            self._write_masks(writes.masks[i : i + PIECE_LINES])
        if writes.tokens is not None:
            self._write_tokens(writes.tokens, previous)

    @hands_over
    def warmup(self, previous: jax.Array) -> None:
        """Compiles the programs that write; the state stays as it is."""
        self._write_lines(())
        self._write_masks(())
        for size in PIECE_TOKENS:
            self._write_token_piece(np.full((4, 0), 0, np.int32), size, previous)

    def _write_lines(self, lines: Sequence[LineWrite]) -> None:
        fields = _LineArrays(
            line=np.full(PIECE_LINES, self.sizes.num_lines, np.int32),
            values=np.zeros((PIECE_LINES, 4), np.float32),
            num_prompt_tokens=np.zeros(PIECE_LINES, np.int32),
            has_mask=np.zeros(PIECE_LINES, np.bool_),
            wants_best=np.zeros(PIECE_LINES, np.bool_),
            edit_ids=np.full((PIECE_LINES, MAX_EDITS), -1, np.int32),
            edit_bias=np.zeros((PIECE_LINES, MAX_EDITS), np.float32),
            edit_end=np.zeros((PIECE_LINES, MAX_EDITS), np.int32),
        )
        for i, one in enumerate(lines):
            for name in ("line", "values", "num_prompt_tokens", "has_mask", "wants_best"):
                getattr(fields, name)[i] = getattr(one, name)
            for name in ("edit_ids", "edit_bias", "edit_end"):
                getattr(fields, name)[i, : one.edit_ids.size] = getattr(one, name)
        self.arrays = _with_lines(self.arrays, fields)

    def _write_masks(self, masks: Sequence[tuple[int, np.ndarray]]) -> None:
        lines = np.full(PIECE_LINES, self.sizes.num_lines, np.int32)
        words = np.zeros((PIECE_LINES, self.sizes.num_words), np.int32)
        for i, (line, mask) in enumerate(masks):
            lines[i], words[i] = line, mask
        self.arrays = self.arrays._replace(masks=_with_masks(self.arrays.masks, lines, words))

    def _write_tokens(self, tokens: TokenWrites, previous: jax.Array) -> None:
        columns = np.stack([tokens.lines, tokens.places, tokens.token_ids, tokens.source])
        size = PIECE_TOKENS[0] if columns.shape[1] <= PIECE_TOKENS[0] else PIECE_TOKENS[-1]
        for i in range(0, columns.shape[1], size):
            self._write_token_piece(columns[:, i : i + size], size, previous)

    def _write_token_piece(self, columns: np.ndarray, size: int, previous: jax.Array) -> None:
        padded = np.full((4, size), self.sizes.num_lines, np.int32)
        padded[:, : columns.shape[1]] = columns
        padded[3, columns.shape[1] :] = -1
        self.arrays = self.arrays._replace(token_ids=_with_tokens(self.arrays.token_ids, padded, previous))


def _empty(sizes: SamplerSizes) -> SamplerArrays:
    lines, edits = sizes.num_lines, (sizes.num_lines, MAX_EDITS)
    columns = -(-sizes.num_tokens // TOKEN_COLUMNS) * TOKEN_COLUMNS
    return SamplerArrays(
        values=jnp.tile(jnp.array([0, 0, 1, 0], jnp.float32), (lines, 1)),
        num_prompt_tokens=jnp.zeros(lines, jnp.int32),
        has_mask=jnp.zeros(lines, jnp.bool_),
        wants_best=jnp.zeros(lines, jnp.bool_),
        edit_ids=jnp.full(edits, -1, jnp.int32),
        edit_bias=jnp.zeros(edits, jnp.float32),
        edit_end=jnp.zeros(edits, jnp.int32),
        masks=jnp.full((lines, sizes.num_words), -1, jnp.int32),
        token_ids=jnp.zeros((lines, columns), jnp.int32),
    )


@partial(jax.jit, donate_argnums=0)
def _with_lines(arrays: SamplerArrays, lines: _LineArrays) -> SamplerArrays:
    written = {name: getattr(arrays, name).at[lines.line].set(value, mode="drop") for name, value in _columns(lines)}
    return arrays._replace(**written)


def _columns(lines: _LineArrays) -> list[tuple[str, jax.Array]]:
    return [(name, value) for name, value in lines._asdict().items() if name != "line"]


@partial(jax.jit, donate_argnums=0)
def _with_masks(masks: jax.Array, lines: jax.Array, words: jax.Array) -> jax.Array:
    return masks.at[lines].set(words, mode="drop")


@partial(jax.jit, donate_argnums=0)
def _with_tokens(token_ids: jax.Array, columns: jax.Array, previous: jax.Array) -> jax.Array:
    lines, places, known, source = columns
    tokens = jnp.where(source >= 0, previous[jnp.maximum(source, 0)], known)
    return token_ids.at[lines, places].set(tokens, mode="drop")


__all__ = ["TOKEN_COLUMNS", "SamplerArrays", "SamplerState"]

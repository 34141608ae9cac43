"""The tokens of a step whose hidden states are wanted: in the last layer they alone have queries.

Flow:    DeviceBatch -> [wanted_rows] -> StepCache.wanted -> the model's last layer
         LayerStep + wanted rows -> [of_wanted] -> LayerStep of a step in which each row is a decoding sequence

K and V of all tokens are written, for later steps; but of a prompt's chunk the model's output is wanted for one token,
or none. A row then stands for a sequence that ends with it, so that decoding attention serves it.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from kvjax.device.inputs.batch import DeviceBatch
from kvjax.device.layers.layer_step import LayerStep
from pallas_kernels.default_rules import by_default_rules

MOST_TABLE_ENTRIES = 2**16  # of the wanted rows' tables, where they are more than the step's sequences


def wanted_rows(batch: DeviceBatch) -> jax.Array | None:  # int32[N]
    """The tokens whose logits the step computes, in order, then padding; None: all, or too many.

    Steps with drafts want several rows a sequence, and each takes a table: large ones may not fit where kernels hold
    those of a step.
    """
    rows, tables = batch.logits_indices, [group.block_tables.shape for group in batch.groups]
    if rows.shape[0] >= batch.token_ids.shape[0]:
        return None
    if any(rows.shape[0] > max(num_seqs, MOST_TABLE_ENTRIES // columns) for num_seqs, columns in tables):
        return None
    return jnp.asarray(rows)


@by_default_rules
def of_wanted(layer: LayerStep, rows: jax.Array) -> LayerStep:  # int32[N]
    """The layer with the wanted tokens alone, each the last of a sequence of its own; nothing is left to be written."""
    batch, group = layer.batch, layer.group
    starts = jnp.asarray(batch.query_start_loc)
    ends, num_rows = starts[1:], rows.shape[0]
    sequence = jnp.minimum(jnp.sum(ends <= rows[:, None], axis=1, dtype=jnp.int32), ends.shape[0] - 1)
    seq_lens = jnp.asarray(group.seq_lens)[sequence] - (ends[sequence] - 1 - rows)
    is_first = jnp.arange(num_rows, dtype=jnp.int32) == 0
    is_real = (is_first | (rows > 0)) & (rows < starts[-1])  # padding asks for token 0 again
    count = jnp.sum(is_real, dtype=jnp.int32)
    own_batch = replace(
        batch,
        query_start_loc=jnp.minimum(jnp.arange(num_rows + 1, dtype=jnp.int32), count),
        distribution=jnp.full(3, count, jnp.int32),
        is_decode=True,
    )
    own_group = replace(
        group,
        block_tables=jnp.where(is_real[:, None], jnp.asarray(group.block_tables)[sequence], 0),
        seq_lens=jnp.where(is_real, seq_lens, 0),
        slot_mapping=jnp.full(num_rows, -1, jnp.int32),
        prompt_tokens=None if group.prompt_tokens is None else jnp.asarray(group.prompt_tokens)[sequence],
    )
    return replace(layer, batch=own_batch, group=own_group, schedules={})


__all__ = ["of_wanted", "wanted_rows"]

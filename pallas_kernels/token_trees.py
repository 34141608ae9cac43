"""Which of a step's own tokens a query sees, where the drafts of a sequence form a tree.

Flow:    tree_mask of an attention op + lengths of the step -> [TokenTrees] -> who sees what, in every implementation

Of the new tokens of a sequence, those before `own` excepted, a query sees those that its bits name; they are its path
from the root, itself last. Slots follow the order of tokens, positions the path: the r-th token of a path stands at
`own + r`, and windows, chunks and sink tokens go by that.

    new token        0      1      2      3         0 is the root, 1 and 2 are its children, 3 is a child of 1
    slot             own    own+1  own+2  own+3
    bits, 0 first    1      11     101    1101
    position         own    own+1  own+1  own+2

Whoever is no path either (a query that sees two branches) counts the same way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mask import MaskRule

NO_TREES = "the kernel has no tree_mask"
NO_TREE = 1 << 30  # `own` of a token that sees what the mask rule says: a slot that no sequence has
MOST_TOKENS = 32  # new ones of a sequence with a tree, a bit each


class TokenTrees(NamedTuple):
    """Of the T query tokens of a step, padding included."""

    own: jax.Array  # int32[T] slot of the first new token of the token's sequence, or NO_TREE
    bits: jax.Array  # int32[T] new tokens that it sees, those outside of its window left out
    lower: jax.Array  # int32[T] first key before `own` that it sees, sink tokens apart

    @classmethod
    def of_step(
        cls,
        tree_mask: jax.Array,  # uint32[T]
        seq_lens: jax.Array,  # int32[S]
        query_start_loc: jax.Array,  # int32[S + 1]
        distribution: jax.Array,  # int32[3]
        mask: MaskRule,
    ) -> TokenTrees:
        """What an op's `tree_mask` says under its mask rule."""
        token = jnp.arange(tree_mask.shape[0], dtype=jnp.int32)
        seq = jnp.sum(query_start_loc[1:][None] <= token[:, None], axis=1, dtype=jnp.int32)
        has_tree = (seq < distribution[2]) & (tree_mask != 0)
        seq = jnp.minimum(seq, seq_lens.shape[0] - 1)
        own = seq_lens[seq] - jnp.diff(query_start_loc)[seq]
        lower = mask.lower(own + lax.population_count(tree_mask).astype(jnp.int32) - 1)
        bits = tree_mask
        if mask.sliding_window is not None or mask.attention_chunk_size is not None:
            bit = jnp.uint32(1) << jnp.arange(MOST_TOKENS, dtype=jnp.uint32)
            before = lax.population_count(tree_mask[:, None] & (bit - 1)).astype(jnp.int32)
            position = own[:, None] + before
            is_near = (position >= lower[:, None]) | (position < mask.num_sink_tokens)
            bits = jnp.sum(jnp.where(is_near, tree_mask[:, None] & bit, 0), axis=1, dtype=jnp.uint32)
        bits = lax.bitcast_convert_type(bits, jnp.int32)
        return cls(jnp.where(has_tree, own, NO_TREE), jnp.where(has_tree, bits, 0), lower)

    def first_position(self, token: Any, first_pos: Any) -> Any:
        """Lowest position of tokens of the sequence of `token`, which stands in slot `first_pos`, from it on; int32."""
        return jnp.minimum(first_pos, self.own.at[token].get(mode="clip"))

    def visible(self, mask: MaskRule, key: jax.Array, token: jax.Array, slot: jax.Array) -> jax.Array:
        """Whether query `token`, in slot `slot` of its sequence, sees the key in slot `key`; int32, broadcast."""
        return self.sees(mask, key, slot, *(x.at[token].get(mode="clip") for x in self))

    @staticmethod
    def sees(
        mask: MaskRule, key: jax.Array, slot: jax.Array, own: jax.Array, bits: jax.Array, lower: jax.Array
    ) -> jax.Array:
        """As `visible`, of queries whose fields are these."""
        lower = jnp.where(own < NO_TREE, lower, mask.lower(slot))
        is_named = (lax.shift_right_logical(*jnp.broadcast_arrays(bits, (key - own) & (MOST_TOKENS - 1))) & 1) == 1
        return jnp.where(key >= own, is_named & (key <= slot), mask.within(key, lower, slot))


def tile_span(queries: int, trees: TokenTrees | None) -> int:
    """Successive tokens whose windows hold all that `queries` successive queries see."""
    return queries if trees is None else max(queries, MOST_TOKENS)


def trees_of_step(
    tree_mask: jax.Array | None,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    distribution: jax.Array,
    mask: MaskRule,
) -> TokenTrees | None:
    """`TokenTrees.of_step`, where there are any."""
    if tree_mask is None:
        return None
    return TokenTrees.of_step(tree_mask, seq_lens, query_start_loc, distribution, mask)

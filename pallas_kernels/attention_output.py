"""Result of every attention op."""

from __future__ import annotations

from typing import NamedTuple

import jax


class AttentionOutput(NamedTuple):
    """Attention over paged KV.

    out:   [num_tokens, num_q_heads, head_dim_v] in q's dtype; 0 for padding tokens
    lse:   float32[num_tokens, num_q_heads] natural-log sum of exponentials, sinks included; -inf where nothing is
           visible and for padding; None unless asked for
    pages: the page arrays, with new KV written if any was given
    """

    out: jax.Array
    lse: jax.Array | None
    pages: tuple[jax.Array, ...]

"""Tuned sizes of ragged_paged_attention: what an entry of tuned/<device>.json is for.

Flow:    a call's shapes -> [TunedShape] -> tuned/<device>.json -> sizes for tpu_tuning and kernel_gpu
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.layouts import tokens_per_row
from pallas_kernels.mask import MaskRule
from pallas_kernels.tuned import tuned_sizes

OP = "ragged_paged_attention"
FOLDER = Path(__file__).parent / "tuned"


class TunedShape(NamedTuple):
    """What decides about the best sizes; heads are those of one shard."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    q_dtype: str
    page_dtype: str
    sliding_window: int | None
    attention_chunk_size: int | None

    @classmethod
    def of(cls, q: jax.Array, pages: jax.Array, num_kv_heads: int, mask: MaskRule) -> TunedShape:
        """The tuned shape of a call; `pages`: the first array of an attention layout."""
        packing = pages.shape[3] if pages.ndim == 5 else 1  # of split pages that is a head's dimension
        page_size = pages.shape[1] * tokens_per_row(num_kv_heads, packing)
        return cls(
            *(q.shape[1], num_kv_heads, q.shape[2], page_size),
            *(jnp.dtype(q.dtype).name, jnp.dtype(pages.dtype).name),
            *(mask.sliding_window, mask.attention_chunk_size),
        )


def sizes_for(device: str | None, shape: TunedShape, size_names: tuple[str, ...]) -> dict[str, int]:
    """Tuned sizes out of `size_names`; none for a device without a file, None among them, or a shape without an entry.

    Raises:
        ValueError: the device's file is broken.
    """
    return tuned_sizes(FOLDER, device, OP, shape._asdict(), size_names)

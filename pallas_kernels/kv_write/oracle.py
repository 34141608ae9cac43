"""What kv_write must leave in pages: a token at a time, numbers rounded from float64."""

from __future__ import annotations

import numpy as np

from pallas_kernels.cases.numbers import rounded
from pallas_kernels.cases.pages import by_token, with_tokens


def kv_write(
    new: tuple[np.ndarray, np.ndarray],  # K, V [num_tokens, num_kv_heads, head_dim]
    pages: tuple[np.ndarray, ...],  # split or packed
    slots: np.ndarray,  # int32[num_tokens]
    page_size: int,
    scales: tuple[np.ndarray | None, np.ndarray | None],  # [] or [num_kv_heads]
) -> tuple[np.ndarray, ...]:
    """The pages afterwards: token t at slot `slots[t]`, -1 and slots of page 0 apart; padding of a token is zero."""
    pages = tuple(array.copy() for array in pages)
    heads, dim = new[0].shape[1:]
    tokens = by_token(pages[0], heads, dim) if len(pages) == 1 else None
    for t in np.flatnonzero(slots >= page_size):
        page, slot = divmod(int(slots[t]), page_size)
        k, v = (
            rounded(x[t].astype(np.float64) / (1.0 if scale is None else np.reshape(scale, (-1, 1))), pages[0].dtype)
            for x, scale in zip(new, scales, strict=True)
        )
        if tokens is None:
            pages[0][page, slot], pages[1][page, slot] = k, v
            continue
        token = tokens[page, slot]
        token[:] = np.zeros((), token.dtype)
        token[0 : 2 * heads : 2, :dim], token[1 : 2 * heads : 2, :dim] = k, v
    return pages if tokens is None else (with_tokens(pages[0], heads, tokens),)

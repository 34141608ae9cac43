"""What latent_write must leave in pages: a state at a time, numbers rounded from float64."""

from __future__ import annotations

import numpy as np

from pallas_kernels.cases.latents import by_state, with_states
from pallas_kernels.cases.numbers import rounded


def latent_write(
    states: np.ndarray,  # [num_states, dim]
    pages: np.ndarray,  # either layout
    slots: np.ndarray,  # int32[num_states]
    page_size: int,
    scale: np.ndarray | None,
) -> np.ndarray:
    """The pages afterwards: state n at slot `slots[n]`, -1 and slots of page 0 apart; padding of a state is zero."""
    found = by_state(pages)
    for n in np.flatnonzero(slots >= page_size):
        row = found[slots[n] // page_size, slots[n] % page_size]
        row[:] = np.zeros((), pages.dtype)
        row[: states.shape[1]] = rounded(states[n].astype(np.float64) / (1.0 if scale is None else scale), pages.dtype)
    return with_states(pages, found)

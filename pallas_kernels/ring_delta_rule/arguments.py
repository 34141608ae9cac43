"""Arguments of ring_delta_rule after their checks, as the implementations take them.

Flow:    api -> [DeltaRing], [Inputs], [Options] -> reference, kernels

Axis names as in api.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.gated_delta_rule.arguments import Inputs
from pallas_kernels.gated_delta_rule.arguments import Options as RuleOptions


class DeltaRing(NamedTuple):
    """What the tokens after the base states add to them: `k_j delta_j^T`, and their decays."""

    keys: jax.Array  # [pages, R, G, K] in the dtype of k, as given: before the norm
    deltas: jax.Array  # [pages, R, H, V]
    decays: jax.Array  # [pages, R, H] or [pages, R, H, K]: g of each token


# states, keys, deltas, decays; those of one column of slabs are a `SlabColumn`
Pages = tuple[jax.Array, ...]


class Options(NamedTuple):
    """What is known when the call is traced."""

    rule: RuleOptions
    max_new_tokens: int


__all__ = ["DeltaRing", "Inputs", "Options", "Pages"]

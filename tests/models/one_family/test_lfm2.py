"""LFM2's experts: weights where the router likes none of them. What else the family keeps, test_families.py says."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from kvjax.models.configs.experts import ExpertsConfig
from kvjax.models.layers.experts import choose_experts


def test_weights_are_divided_by_a_sum_that_is_never_zero() -> None:
    """Scores of 1e-6 and less: what is added to their sum is most of it."""
    config = ExpertsConfig(
        num_experts=3, top_k=2, intermediate_size=1, norm_topk=True, norm_eps=1e-6, score="sigmoid", scale=2.0
    )
    scores = np.array([1e-6, 4e-7, 1e-8])
    weights, experts = choose_experts(jnp.asarray(np.log(scores / (1 - scores)), jnp.float32)[None], config)
    assert experts.tolist() == [[0, 1]]
    np.testing.assert_allclose(weights[0], 2.0 * scores[:2] / (1.4e-6 + 1e-6), rtol=1e-4)

"""How a layer's experts are chosen and weighted. No jax.

Flow:    a family's config -> [ExpertsConfig] -> layers.experts
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts: a router scores them for each token, the best `top_k` are computed and summed."""

    num_experts: int
    top_k: int
    intermediate_size: int  # of each expert
    norm_topk: bool  # the weights of the chosen ones sum up to 1 (before `scale`)
    score: str = "softmax"  # of the router's logits: "softmax" or "sigmoid"
    scale: float = 1.0  # of the weights
    num_groups: int = 1  # experts are chosen from `top_groups` of the groups, those whose two best score highest
    top_groups: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"expected num_experts_per_tok in [1, {self.num_experts}], got {self.top_k}")
        if self.score not in ("softmax", "sigmoid"):
            raise ValueError(f"expected a score of softmax or sigmoid, got {self.score!r}")

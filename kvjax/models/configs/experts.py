"""How a layer's experts are chosen and weighted. No jax.

Flow:    a family's config -> [ExpertsConfig] -> layers.experts
"""

from __future__ import annotations

from dataclasses import dataclass

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
# How tensors of experts lie in a checkpoint: each its own, or of all experts as [E, out, in] or [E, in, out].
APART, ROWS, COLUMNS = "apart", "rows", "columns"


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts: a router scores them for each token, the best `top_k` are computed and summed."""

    num_experts: int
    top_k: int
    intermediate_size: int  # of each expert
    norm_topk: bool  # the weights of the chosen ones sum up to 1 (before `scale`)
    norm_eps: float = 0.0  # added to the sum that the weights are divided by
    score: str = "softmax"  # of the router's logits, one of SCORES
    scale: float = 1.0  # of the weights
    num_groups: int = 1  # experts are chosen from `top_groups` of the groups
    top_groups: int = 1
    group_best: int = 2  # a group ranks by the sum of this many of its best
    limit: float | None = None  # experts take gates up to this, and what they gate between minus this and this

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"expected num_experts_per_tok in [1, {self.num_experts}], got {self.top_k}")
        if self.score not in SCORES:
            raise ValueError(f"expected a score among {', '.join(SCORES)}, got {self.score!r}")
        if self.num_experts % self.num_groups or not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(
                f"expected n_group to divide {self.num_experts} experts and topk_group in [1, n_group], "
                f"got {self.num_groups} and {self.top_groups}"
            )
        group_size = self.num_experts // self.num_groups
        if self.num_groups > 1 and (self.group_best > group_size or self.top_k > self.top_groups * group_size):
            raise ValueError(
                f"expected groups of at least {self.group_best} experts and {self.top_k} (num_experts_per_tok) in "
                f"{self.top_groups} groups (topk_group), got groups of {group_size}"
            )

"""A projection that knows how it is split over devices.

Flow:    x[..., in] -> [Linear] -> [..., out]
"""

from __future__ import annotations

from typing import Any

from flax import nnx


class Linear(nnx.Linear):
    """`split` is "columns" (outputs), "rows" (inputs) or None (whole on every device).

    `units` things (heads, say) must stay whole: where devices do not divide them, so does the projection.
    """

    def __init__(self, in_size: int, out_size: int, *, split: str | None, units: int | None, **kwargs: Any) -> None:
        super().__init__(in_size, out_size, **kwargs)
        self.split = split
        self.units = units

    def param_splits(self) -> dict[str, tuple[int, int]]:
        """By parameter: the dimension that devices split, and how many parts it may have at most or a divisor of."""
        if self.split == "columns":
            units = self.units or self.out_features
            return {"kernel": (1, units), "bias": (0, units)}
        if self.split == "rows":
            return {"kernel": (0, self.units or self.in_features)}
        return {}

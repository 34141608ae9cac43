"""Values that settings of several architectures are made of. No torch."""

from __future__ import annotations

from typing import Any

from scripts.goldens.small_configs import Data

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


def rope(rope_type: str = "default", **parameters: Any) -> Data:
    """`rope_parameters`."""
    return {"rope_type": rope_type, "rope_theta": 10_000.0} | parameters


class With(dict[str, Any]):
    """A value together with others that it needs beside it."""


YARN = rope("yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=256)

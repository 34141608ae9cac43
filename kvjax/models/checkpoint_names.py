"""Which tensor of a Hugging Face checkpoint each parameter of a `Decoder` is.

Flow:    parameter path -> [TensorName] -> name in the safetensors files, transposed or not
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Last element of a parameter's path -> last part of the tensor's name, and whether the tensor is transposed.
_LEAVES = {
    "kernel": ("weight", True),
    "bias": ("bias", False),
    "embedding": ("weight", False),
    "scale": ("weight", False),
}


@dataclass(frozen=True)
class TensorName:
    """One tensor of a checkpoint; `transposed` if it is [out, in] where the parameter is [in, out]."""

    name: str
    transposed: bool


def tensor_name(
    path: Sequence[Any],  # such as ("layers", 0, "self_attn", "q_proj", "kernel")
    prefix: str = "model.",
) -> TensorName:
    """The tensor of the parameter at `path`; `prefix` stands before all names but the output head's."""
    leaf, transposed = _LEAVES[str(path[-1])]
    name = ".".join([*map(str, path[:-1]), leaf])
    return TensorName(name if path[0] == "lm_head" else prefix + name, transposed)

"""Environment variables that turn something on: 1, or 0 and unset.

Flow:    $KVJAX_VLLM, $KVJAX_ANY_RELEASE -> [is_on] -> the plugin of vLLM, `refuse_unless_allowed`
"""

from __future__ import annotations

import os


def is_on(variable: str) -> bool:
    """Whether the environment turns it on.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(variable) or "0"
    if value not in ("0", "1"):
        raise ValueError(f"expected environment variable {variable} of 0 or 1, got {value!r}; correct it or unset it")
    return value == "1"


__all__ = ["is_on"]

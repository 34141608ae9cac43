"""How a program ends: its JSON on the last line, and its exit status."""

from __future__ import annotations

import json
from typing import Any


def answer(words: str, *, is_right: bool = True, **result: Any) -> int:
    """Prints what was found, `words` for the terminal; returns the exit status."""
    print("\n" + json.dumps({"words": words, "is_right": is_right, **result}), flush=True)
    return 0 if is_right else 1

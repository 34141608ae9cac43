"""Token ids in place of text, for models without a tokenizer.

Flow:    ids -> [token_id_text] -> "17 4 250 "
"""

from __future__ import annotations

from collections.abc import Iterable


def token_id_text(token_ids: Iterable[int]) -> str:
    """The ids with a space behind each."""
    return "".join(f"{token} " for token in token_ids)


__all__ = ["token_id_text"]

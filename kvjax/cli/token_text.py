"""Token ids in place of text, for models without a tokenizer.

Flow:    ids -> [TokenIdText] -> "17 4 250"
"""

from __future__ import annotations

from collections.abc import Sequence


class TokenIdText:
    """A tokenizer whose text is the ids themselves."""

    def encode(self, text: str) -> list[int]:
        """Raises ValueError: there is no tokenizer."""
        raise ValueError(
            f"expected prompt_token_ids in a .jsonl file, got the text {text[:40]!r}: the model has no tokenizer.json"
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """The ids with a space behind each."""
        return "".join(f"{token} " for token in token_ids)

"""What counts as token ids, and how the rest is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvjax.core.requests.token_ids import MAX_TOKEN_ID, as_token_ids


@pytest.mark.parametrize(
    "values",
    [
        [0, 5, MAX_TOKEN_ID],
        (1,),
        range(3),
        [],
        *(np.arange(4, dtype=dtype) for dtype in (np.uint8, np.int64, ">i4")),
    ],
)
def test_rows_of_integers_become_int32(values: Any) -> None:
    tokens = as_token_ids(values)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == list(values)


def test_an_int32_row_is_not_copied() -> None:
    row = np.arange(4, dtype=np.int32)
    assert as_token_ids(row) is row


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, 2.0], "expected integer ids, got float64: 1.0, ..."),
        ([1, 2.5], "expected integer ids, got float64"),
        ([True, False], "expected integer ids, got bool"),
        (["1"], "expected integer ids, got <U1"),
        ([2**70], "expected integer ids, got object"),
        ([3, -1, 2], "expected ids >= 0, got -1 at index 1"),
        (np.array([0, 2**31]), "expected ids <= 2147483647, got 2147483648 at index 1"),
        (np.array([3, -1], np.int8), "expected ids >= 0, got -1 at index 1"),
        (np.array([3, -1], ">i4"), "expected ids >= 0, got -1 at index 1"),
        (np.array([2**63], np.uint64), "expected ids <= 2147483647, got 9223372036854775808 at index 0"),
        ([[1, 2]], r"expected ids as a row of integers, got shape \[1, 2\]"),
        (7, r"expected ids as a row of integers, got shape \[\]"),
        (None, r"expected ids as a row of integers, got shape \[\]"),
    ],
)
def test_all_else_is_refused(values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_token_ids(values, "ids")

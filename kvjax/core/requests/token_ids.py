"""Token ids that callers pass, checked and made int32.

Flow:    caller's ints, lists, arrays -> [as_token_ids] -> Request, RequestTable
"""

from __future__ import annotations

from typing import Any

import numpy as np

MAX_TOKEN_ID = 2**31 - 1
UNSIGNED = {np.dtype(name): np.dtype("u" + name[1]) for name in ("i4", "i8", "u4", "u8")}  # dtypes of one size


def as_token_ids(values: Any, name: str = "token_ids") -> np.ndarray:  # int32[n], possibly `values` itself
    """`values` as a row of token ids.

    Raises:
        ValueError: `values` are not a row of integers in [0, 2**31).
    """
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"expected {name} as a row of integers, got shape {list(array.shape)}")
    if not array.size:
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        raise ValueError(f"expected integer {name}, got {array.dtype}: {array[:1].tolist()[0]!r:.80}, ...")
    if array.dtype not in UNSIGNED:  # narrow, or of foreign byte order
        array = array.astype(np.int64)
    if np.maximum.reduce(array.view(UNSIGNED[array.dtype])) > MAX_TOKEN_ID:  # a negative number is a huge one
        _refuse(array, name)
    return array.astype(np.int32, copy=False)


def _refuse(array: np.ndarray, name: str) -> None:
    if int(array.min()) < 0:
        raise ValueError(f"expected {name} >= 0, got {int(array.min())} at index {int(array.argmin())}")
    raise ValueError(f"expected {name} <= {MAX_TOKEN_ID}, got {int(array.max())} at index {int(array.argmax())}")

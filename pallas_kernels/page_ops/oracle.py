"""What page_ops must give: a page at a time."""

from __future__ import annotations

import numpy as np


def copied(pages: np.ndarray, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The pages, of them `targets` as `sources`; -1 and page 0 are no targets, as a source -1 stands for page 0."""
    found = pages.copy()
    for source, target in zip(sources, targets, strict=True):
        if target > 0:
            found[target] = pages[max(source, 0)]
    return found


def zeroed(pages: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The pages, of them `targets` zero."""
    return scattered(pages, targets, np.zeros((len(targets), *pages.shape[1:]), pages.dtype))


def gathered(pages: np.ndarray, sources: np.ndarray) -> np.ndarray:
    """The pages `sources` [n, *page_shape]."""
    return np.stack([pages[max(source, 0)] for source in sources])


def scattered(pages: np.ndarray, targets: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The pages, of them `targets` as `values`."""
    found = pages.copy()
    for target, value in zip(targets, values, strict=True):
        if target > 0:
            found[target] = value
    return found

"""Tests of the device layer compile much and run little of it: XLA leaves most optimizations out."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="package", autouse=True)
def quick_compilation() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)

"""What is tested here is what XLA makes of a program for users: it optimizes in full."""

import pytest


@pytest.fixture(autouse=True)
def optimized(full_optimization: None) -> None:
    """For every test of this package."""

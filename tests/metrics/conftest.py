"""Every pool and manager that a test makes is checked when the test ends."""

from tests.core.conftest import check_invariants_of_everything_made

__all__ = ["check_invariants_of_everything_made"]

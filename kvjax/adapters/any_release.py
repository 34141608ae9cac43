"""Whether a release of a stack that differs from every recorded one is refused, or runs at its user's own risk.

Flow:    an adapter that found a difference -> [refuse_unless_allowed] -> UnknownStackError, or a warning and on
"""

from __future__ import annotations

import logging

from kvjax.adapters.switches import is_on
from kvjax.errors import UnknownStackError

VARIABLE = "KVJAX_ANY_RELEASE"

_logger = logging.getLogger(__name__)


def refuse_unless_allowed(difference: str) -> None:
    """Refuses a release by how it differs, unless the environment variable KVJAX_ANY_RELEASE is 1; then it warns.

    Raises:
        UnknownStackError: the variable is not set.
        ValueError: the variable is neither 0 nor 1.
    """
    if not is_on(VARIABLE):
        raise UnknownStackError(f"{difference}; {VARIABLE}=1 runs it all the same, at your own risk")
    _logger.warning("%s; kvjax goes on because %s=1: tokens and hits may be wrong", difference, VARIABLE)


__all__ = ["VARIABLE", "refuse_unless_allowed"]

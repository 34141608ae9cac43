"""What XLA makes of references for users is tested as it optimizes in full; kernels are interpreted on a CPU."""

import re

import pytest

QUICK = re.compile("tpu|gpu|triton|validate")


@pytest.fixture(autouse=True)
def optimized(request: pytest.FixtureRequest) -> None:
    """Optimizes in full, but for tests of refusals, and of kernels, whose interpreters compile as quickly as may be."""
    callspec = getattr(request.node, "callspec", None)
    backend = "" if callspec is None else str(callspec.params.get("backend", ""))
    if not (QUICK.search(backend) or QUICK.search(request.path.name)):
        request.getfixturevalue("full_optimization")

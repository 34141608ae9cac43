"""What XLA makes of references for users is tested as it optimizes in full; kernels are interpreted on a CPU."""

import re

import pytest

KERNELS = re.compile("tpu|gpu|triton")


@pytest.fixture(autouse=True)
def optimized(request: pytest.FixtureRequest) -> None:
    """Optimizes in full, but for tests of kernels, whose interpreter's programs are compiled as quickly as may be."""
    callspec = getattr(request.node, "callspec", None)
    backend = "" if callspec is None else str(callspec.params.get("backend", ""))
    if not (KERNELS.search(backend) or KERNELS.search(request.path.name)):
        request.getfixturevalue("full_optimization")

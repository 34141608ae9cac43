"""Which implementation an op runs.

Backends: "reference" (plain jnp, any platform), "tpu" and "gpu" (Pallas kernels). "auto" takes the platform's kernel
where there is one and it can do what is asked, else the reference.
"""

from __future__ import annotations

BACKENDS = ("auto", "reference", "tpu", "gpu")


def check_backend(backend: str) -> None:
    """Raises ValueError unless `backend` names one."""
    if backend not in BACKENDS:
        raise ValueError(f"expected backend out of {BACKENDS}, got {backend!r}")

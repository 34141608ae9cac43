"""Which implementation an op runs.

Backends: "reference" (plain jnp, any platform), "tpu" and "gpu" (Pallas kernels). "auto" takes the platform's kernel
where there is one and it can do what is asked, else the reference: silently on CPU, with one warning elsewhere.
"""

from __future__ import annotations

import functools
import warnings

import jax

BACKENDS = ("auto", "reference", "tpu", "gpu")


def resolve_backend(op: str, backend: str) -> str:
    """The backend that runs `op` when the caller asks for `backend`.

    Raises:
        ValueError: `backend` names none.
        NotImplementedError: `backend` is a platform that has no kernel for `op`.
    """
    if backend not in BACKENDS:
        raise ValueError(f"{op}: expected backend out of {BACKENDS}, got {backend!r}")
    if backend in ("tpu", "gpu"):
        raise NotImplementedError(f"{op}: there is no {backend} kernel; use backend='auto' or 'reference'")
    if backend == "auto" and jax.default_backend() != "cpu":
        _warn_of_fallback(op, jax.default_backend())
    return "reference"


@functools.cache
def _warn_of_fallback(op: str, platform: str) -> None:
    """Warns once per op and platform."""
    warnings.warn(
        f"{op}: there is no kernel for {platform}; the reference runs instead (backend='reference' silences this)",
        RuntimeWarning,
        stacklevel=4,
    )

"""Which implementation an op runs.

Backends: "reference" (plain jnp, any platform), "tpu" and "gpu" (Pallas kernels). "auto" takes the platform's kernel
where there is one and it can do what is asked, else the reference: silently on CPU, with one warning elsewhere.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from types import MappingProxyType

import jax

BACKENDS = ("auto", "reference", "tpu", "gpu")
_PLATFORMS = ("tpu", "gpu")
_NONE: Mapping[str, str | None] = MappingProxyType({})


def resolve_backend(op: str, backend: str, kernels: Mapping[str, str | None] = _NONE) -> str:
    """The backend that runs `op` when the caller asks for `backend`.

    `kernels` names the platforms that have a kernel, each with what of this call it cannot do, in words, or None.

    Raises:
        ValueError: `backend` names none.
        NotImplementedError: `backend` is a platform that has no kernel for `op`, or whose kernel cannot do the call.
    """
    if backend not in BACKENDS:
        raise ValueError(f"{op}: expected backend out of {BACKENDS}, got {backend!r}")
    if backend in _PLATFORMS:
        reason = _reason(backend, kernels)
        return backend if reason is None else fall_back(op, backend, reason)
    platform = jax.default_backend()
    if backend == "reference" or platform == "cpu":
        return "reference"
    reason = _reason(platform, kernels)
    return platform if reason is None else fall_back(op, backend, reason)


def fall_back(op: str, backend: str, reason: str) -> str:
    """The reference, with a warning, where `backend` is "auto" and its kernel cannot do the call.

    Raises:
        NotImplementedError: `backend` is a platform.
    """
    if backend in _PLATFORMS:
        raise NotImplementedError(f"{op}: {reason}; use backend='auto' or 'reference'")
    _warn_of_fallback(op, reason)
    return "reference"


def _reason(platform: str, kernels: Mapping[str, str | None]) -> str | None:
    return kernels.get(platform, f"there is no {platform} kernel")


@functools.cache
def _warn_of_fallback(op: str, reason: str) -> None:
    """Warns once per op and reason."""
    warnings.warn(
        f"{op}: {reason}; the reference runs instead (backend='reference' silences this)",
        RuntimeWarning,
        stacklevel=5,
    )

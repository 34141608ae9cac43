"""Which implementation an op runs.

Backends: "reference" (plain jnp, any platform), "xla" (plain jnp too, vectorised for an accelerator; the reference of
ops that need no other), "tpu" and "gpu" (Pallas kernels), "triton" (Pallas kernels for GPUs that "gpu" does not serve;
"xla" of ops that have none). "auto" takes the platform's kernel where there is one and it can do what is asked; else on
a GPU "triton" or "xla" where the op has it, else the reference: silently on CPU, with one warning elsewhere. A kernel
that never ran on the kind of chip is told of once (`ran_on`).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import jax

from pallas_kernels.ran_on import tell_untried

BACKENDS = ("auto", "reference", "xla", "tpu", "gpu", "triton")
_BY_NAME = ("tpu", "gpu", "triton")  # those that say what they cannot do
_PATHS = MappingProxyType({"xla": "vectorised XLA runs", "triton": "a kernel in Triton runs"})
Reason: TypeAlias = str | Callable[[], str | None] | None  # what a kernel cannot do; functions say it when asked
_NONE: Mapping[str, Reason] = MappingProxyType({})


def by_xla() -> None:
    """The reason of a platform on which XLA compiles the reference: there is nothing that it cannot do."""


class XlaPath(NamedTuple):
    """What an op costs on a GPU without a kernel of "gpu": so many passes over the bytes that the step names."""

    passes: int
    num_bytes: int  # at most, as the shapes have it
    what: str  # they are of
    triton_passes: int = 2  # of a Triton kernel, where the op has one
    backend: str = "xla"

    @property
    def by_triton(self) -> XlaPath:
        """What the op's Triton kernel costs."""
        return self._replace(passes=self.triton_passes, backend="triton")

    def __str__(self) -> str:
        milliseconds = self.passes * self.num_bytes / 1e9
        return (
            f"about {self.passes} passes over {self.what}, at most {self.num_bytes / 1e9:.3g} GB: "
            f"{milliseconds:.3g} ms a call at 1 TB/s of memory bandwidth"
        )


def resolve_backend(op: str, backend: str, kernels: Mapping[str, Reason] = _NONE, xla: XlaPath | None = None) -> str:
    """The backend that runs `op` when the caller asks for `backend`.

    `kernels` names the platforms that have a kernel, each with what of this call it cannot do, in words, or None;
    `xla` is given by ops that have a path in vectorised XLA; where `kernels` has "triton", a GPU runs that before it.

    Raises:
        ValueError: `backend` names none.
        NotImplementedError: `backend` is a platform that has no kernel for `op`, or whose kernel cannot do the call.
    """
    if backend not in BACKENDS:
        raise ValueError(f"{op}: expected backend out of {BACKENDS}, got {backend!r}")
    if backend == "triton" and backend not in kernels:
        backend = "xla"
    if backend in _BY_NAME:
        reason = _reason(backend, kernels)
        return backend if reason is None else fall_back(op, backend, reason)
    if backend == "xla":
        return "reference" if xla is None else "xla"
    platform = jax.default_backend()
    if backend == "reference" or platform == "cpu":
        return "reference"
    reason = _reason(platform, kernels)
    if reason is None:
        if kernels[platform] is not by_xla:
            tell_untried(op, platform)
        return platform
    if platform == "gpu" and xla is not None and _reason("triton", kernels) is None:
        tell_untried(op, "triton")
        return fall_back(op, backend, reason, xla.by_triton)
    return fall_back(op, backend, reason, xla if platform == "gpu" else None)


def fall_back(op: str, backend: str, reason: str, xla: XlaPath | None = None) -> str:
    """The backend of `xla` if there is such a path, else the reference, with a warning, where `backend` is "auto".

    Raises:
        NotImplementedError: `backend` is a platform.
    """
    if backend in _BY_NAME:
        raise NotImplementedError(f"{op}: {reason}; use backend='auto' or 'reference'")
    chosen, path = "reference", "the reference runs instead"
    if xla is not None:
        chosen, path = xla.backend, f"{_PATHS[xla.backend]} instead, with {xla}"
    for _ in _once(op, reason):
        warnings.warn(f"{op}: {reason}; {path} (backend={chosen!r} silences this)", RuntimeWarning, stacklevel=5)
    return chosen


def _reason(platform: str, kernels: Mapping[str, Reason]) -> str | None:
    reason = kernels.get(platform, f"there is no {platform} kernel")
    return reason() if callable(reason) else reason


@functools.cache
def _once(op: str, reason: str) -> Iterator[None]:
    """One None for each op and reason in the life of the process."""
    return iter((None,))

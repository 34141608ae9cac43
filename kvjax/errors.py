"""Errors of capacity and state. A caller's mistake is a `ValueError`; these say what the cache cannot do now."""

from __future__ import annotations


class KVCacheError(Exception):
    """Base of every error that this library raises for a capacity or a state; nothing was changed."""


class OutOfBlocksError(KVCacheError, ValueError):
    """A pool has fewer free blocks than a call needs. The pool is unchanged."""


class MemoryBudgetError(KVCacheError, ValueError):
    """A budget is too small for the cache of one request; the message says how many bytes or blocks are missing."""


class BlockStateError(KVCacheError, ValueError):
    """A block is not in the state that a call needs, such as freeing a free block. The pool is unchanged."""


class UnknownRequestError(KVCacheError, KeyError):
    """The manager holds no request of that id. Nothing is changed."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class EngineClosedError(KVCacheError, RuntimeError):
    """An engine takes no requests: it was stopped, or a failure took its device away; the message says what to do."""


class TransferError(KVCacheError, RuntimeError):
    """KV that was to come from elsewhere did not arrive; nothing was written, and the tokens can be computed here."""


class TierDataError(KVCacheError, OSError):
    """A unit of a tier is gone, or its bytes are not those that were stored; what needs it is computed again."""


class StepFailedError(KVCacheError, RuntimeError):
    """A step of an engine raised, and the request was in it, or its own matcher did; `__cause__` is what was raised."""


class NonFiniteLogitsError(KVCacheError, ArithmeticError):
    """A model's scores of a request's next token are NaN or infinite, so that no token follows; the request ends."""


class DivergenceError(KVCacheError, RuntimeError):
    """Processes that run one engine have planned different steps; the message says from which step on."""


class PeerLostError(KVCacheError, RuntimeError):
    """A process that shares the mesh is gone, and this one cannot go on; `process` is the number of the lost one."""

    def __init__(self, message: str, process: int | None = None) -> None:
        super().__init__(message)
        self.process = process


class NeverHitsWarning(UserWarning):
    """Prefix caching is on, and no prompt can ever hit as the cache is set up; the message says why."""


class InvariantError(KVCacheError, AssertionError):
    """A `check_invariants` found a law broken: a bug of this library, never of its caller."""


class MissingExtraError(KVCacheError, ImportError):
    """A command or function needs an optional dependency; the message names the extra that brings it."""


class MissingStackError(KVCacheError, ImportError):
    """An adapter is used without its serving stack; the message names the package and its versions."""


class UnknownStackError(KVCacheError, TypeError):
    """An object of a serving stack has an attribute that its adapter does not know, or lacks one; the message says."""


class ConfigError(KVCacheError, ValueError):
    """A model or deployment config has an unknown key, a missing key or a value that cannot be."""


class CheckpointError(KVCacheError, ValueError):
    """A checkpoint lacks tensors, has surplus ones, or shapes that do not fit its config."""


class TraceError(KVCacheError, ValueError):
    """A trace file has a bad line; the message starts with `path:line`."""


class CallLogError(KVCacheError, ValueError):
    """A file of recorded calls is none, damaged or of another version, or an answer differs from the recorded one."""


__all__ = [
    "BlockStateError",
    "CallLogError",
    "CheckpointError",
    "ConfigError",
    "DivergenceError",
    "EngineClosedError",
    "InvariantError",
    "KVCacheError",
    "MemoryBudgetError",
    "MissingExtraError",
    "MissingStackError",
    "NeverHitsWarning",
    "NonFiniteLogitsError",
    "OutOfBlocksError",
    "PeerLostError",
    "StepFailedError",
    "TierDataError",
    "TraceError",
    "TransferError",
    "UnknownRequestError",
    "UnknownStackError",
]

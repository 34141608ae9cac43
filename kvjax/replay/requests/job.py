"""One request of a trace on its way through a replay.

Flow:    Arrivals -> [Job] -> BatchedReplay, on one replica or on one after the other
"""

from __future__ import annotations

from dataclasses import dataclass

from kvjax.core.requests.request import Request
from kvjax.replay.requests.trace import TraceRequest


@dataclass(slots=True)
class Job:
    """What one replica has to do of a request."""

    index: int  # in the trace
    source: TraceRequest
    asked_s: float  # when it arrived in the deployment
    arrives_s: float  # at the replica that runs it
    max_tokens: int  # output tokens with which it ends here; a request that asks for none gets one, as in engines
    infinite_hit: int = 0  # tokens that an infinite cache would hit, once it has arrived
    request: Request | None = None  # made when it may be admitted soon: a backlog holds no prompts
    was_admitted: bool = False  # had blocks at some time
    first_token_s: float = 0.0  # when the first was there
    expected_tokens: int = 0  # to prefill, by what a router knew
    goes_on: bool = False  # once it ends here, another replica makes the rest

    @classmethod
    def of(cls, index: int, source: TraceRequest, arrives_s: float) -> Job:
        """The job of a request of the trace, all of it on one replica."""
        return cls(index, source, arrives_s, arrives_s, max(source.output_length, 1))


__all__ = ["Job"]

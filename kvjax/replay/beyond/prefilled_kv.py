"""KV of prompts that another replica computed, on its way to the replica that decodes.

Flow:    Job that a prefill replica ended -> [PrefilledKV.expect]; it is admitted -> links -> arrived -> it decodes
Source:  kvjax.transfer.DecodeConnector: a request pulls its KV once it has blocks, and only what lies behind its hit

A transfer takes the sender's link and the receiver's, begins when both are free, and takes a latency and its bytes over
the bandwidth. The sender has copied the pages when its request ended, so its blocks are free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvjax.core.manager.kv_cache_manager import KVCacheManager
from kvjax.core.pool.kv_cache_blocks import KVCacheBlocks
from kvjax.core.requests.request import Request
from kvjax.replay.beyond.kv_bytes import kv_bytes
from kvjax.replay.virtual_time.clock import VirtualClock
from kvjax.tiers.connector import LoadResults
from kvjax.tiers.units import UnitSizes
from kvjax.tiers.worker.simulated_worker import Channel


@dataclass(frozen=True)
class TransferConfig:
    """The links between replicas: each has one that sends or receives, of every device."""

    bytes_per_s: float = 50e9  # 400 Gb/s
    latency_s: float = 100e-6

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ValueError(f"expected bytes_per_s > 0, got {self.bytes_per_s}")
        if not self.latency_s >= 0:
            raise ValueError(f"expected latency_s >= 0, got {self.latency_s}")

    def link(self) -> Channel:
        """One that nothing has taken yet."""
        return Channel(self.bytes_per_s, self.latency_s)


@dataclass
class PrefilledKV:
    """What comes to one decode replica. An `ExternalKV`, and the `LoadConnector` of one."""

    clock: VirtualClock
    manager: KVCacheManager
    link: Channel
    sizes: UnitSizes
    _link_of: dict[str, Channel] = field(default_factory=dict)  # request that is expected -> its sender's link
    _arrives_s: dict[str, float] = field(default_factory=dict)  # request whose KV travels, in order
    _num_sent: dict[str, int] = field(default_factory=dict)  # by request, in tokens

    @classmethod
    def create(cls, clock: VirtualClock, transfer: TransferConfig, manager: KVCacheManager) -> PrefilledKV:
        """Nothing comes yet."""
        return cls(clock, manager, transfer.link(), UnitSizes.of(manager.kv_cache_config))

    @property
    def connector(self) -> PrefilledKV:
        """Itself."""
        return self

    @property
    def num_transfers(self) -> int:
        """Prompts that were sent so far."""
        return len(self._num_sent)

    @property
    def num_tokens(self) -> int:
        """Tokens that were sent so far."""
        return sum(self._num_sent.values())

    def expect(self, request_id: str, senders_link: Channel) -> None:
        """The prompt of a request that is submitted now lies at a sender."""
        self._link_of[request_id] = senders_link

    @property
    def next_arrival_s(self) -> float:
        """When the next prompt is there; infinite: none travels."""
        return min(self._arrives_s.values(), default=math.inf)

    def get_num_new_matched_tokens(
        self, request: Request, blocks: KVCacheBlocks, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Tokens of the prompt behind a hit that lie at a sender."""
        num_tokens = request.num_prompt_tokens - num_computed_tokens
        if num_tokens <= 0:  # if the request is preempted, it computes its prompt here
            self._link_of.pop(request.request_id, None)
        return (num_tokens, True) if request.request_id in self._link_of else (0, False)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Sends so many tokens of the end of the prompt, once: if the request is preempted, it computes them here."""
        senders_link = self._link_of.pop(request.request_id)
        first = request.num_prompt_tokens - num_external_tokens
        num_bytes = kv_bytes(self.manager, self.sizes, request.row, first, request.num_prompt_tokens)
        begins_s = max(self.clock.now_s, senders_link.free_s, self.link.free_s)
        senders_link.send(begins_s, num_bytes)
        self._arrives_s[request.request_id] = self.link.send(begins_s, num_bytes)
        self._num_sent[request.request_id] = num_external_tokens

    def request_finished(self, request: Request) -> None:
        """What still travels for a request comes to nothing."""
        self._arrives_s.pop(request.request_id, None)

    def num_sent_tokens(self, request_id: str) -> int:
        """Tokens that were sent for a request: they are no hits."""
        return self._num_sent.get(request_id, 0)

    def step_starts(self) -> LoadResults:
        """Requests whose prompts are there."""
        loaded = [name for name, when in self._arrives_s.items() if when <= self.clock.now_s]
        for request_id in loaded:
            del self._arrives_s[request_id]
        return LoadResults(tuple(loaded), ())

    def step_is_planned(self) -> None:
        """Nothing: what is asked for travels at once."""


__all__ = ["PrefilledKV", "TransferConfig"]

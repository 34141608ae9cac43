"""KV of prompts that another replica computed, on its way to the replica that decodes.

Flow:    Job that a prefill replica ended -> [PrefilledKV.expect]; it is admitted -> [PrefilledKV.start] -> links ->
         arrived -> it decodes
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
from kvjax.core.spec import KVCacheConfig
from kvjax.replay.clock import VirtualClock
from kvjax.replay.external_kv import allocate_external
from kvjax.replay.kv_bytes import kv_bytes
from kvjax.tiers.connector import LoadResults
from kvjax.tiers.simulated_worker import Channel
from kvjax.tiers.units import UnitSizes


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
    """What comes to one decode replica. An `ExternalKV`."""

    clock: VirtualClock
    link: Channel
    sizes: UnitSizes
    is_hit: bool = False
    num_tokens: int = 0  # sent so far
    num_transfers: int = 0
    _link_of: dict[str, Channel] = field(default_factory=dict)  # request that is expected -> its sender's link
    _arrives_s: dict[str, float] = field(default_factory=dict)  # request whose KV travels, in order

    @classmethod
    def create(cls, clock: VirtualClock, transfer: TransferConfig, kv_cache_config: KVCacheConfig) -> PrefilledKV:
        """Nothing comes yet."""
        return cls(clock, transfer.link(), UnitSizes.of(kv_cache_config))

    def expect(self, request_id: str, senders_link: Channel) -> None:
        """The prompt of a request that is submitted now lies at a sender."""
        self._link_of[request_id] = senders_link

    @property
    def next_arrival_s(self) -> float:
        """When the next prompt is there; infinite: none travels."""
        return min(self._arrives_s.values(), default=math.inf)

    def start(self, manager: KVCacheManager, request: Request, blocks: KVCacheBlocks, hit: int) -> int | None:
        """Sends the prompt behind a hit; its tokens. 0: nothing of it is elsewhere. None: the blocks do not fit."""
        num_tokens = request.num_prompt_tokens - hit
        senders_link = self._link_of.get(request.request_id)
        if senders_link is None:
            return 0
        if num_tokens <= 0:
            del self._link_of[request.request_id]  # if it is preempted, it computes its prompt here
            return 0
        if not allocate_external(manager, request, blocks, hit, num_tokens):
            return None
        del self._link_of[request.request_id]  # likewise
        num_bytes = kv_bytes(manager, self.sizes, request.row, hit, request.num_prompt_tokens)
        begins_s = max(self.clock.now_s, senders_link.free_s, self.link.free_s)
        senders_link.send(begins_s, num_bytes)
        self._arrives_s[request.request_id] = self.link.send(begins_s, num_bytes)
        self.num_tokens += num_tokens
        self.num_transfers += 1
        return num_tokens

    def cancel(self, request: Request) -> None:
        """What travels for a request comes to nothing: it computes its prompt here."""
        del self._arrives_s[request.request_id]

    def step_starts(self) -> LoadResults:
        """Requests whose prompts are there."""
        loaded = [name for name, when in self._arrives_s.items() if when <= self.clock.now_s]
        for request_id in loaded:
            del self._arrives_s[request_id]
        return LoadResults(tuple(loaded), ())

    def step_is_planned(self) -> None:
        """Nothing: what is asked for travels at once."""


__all__ = ["PrefilledKV", "TransferConfig"]

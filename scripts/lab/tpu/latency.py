"""Time of a kernel that reads ahead: bundles, bytes and the latency of a DMA, by a model.

Flow:    Work (of a sequence, a launch) + chip + latency -> [seconds]

A step of a ring of `buffers` waits for its DMA and works. It starts another, either before it waits, of the step
`buffers - 1` later, or after its work, of the step `buffers` later, whose bytes go where its own were. So the work of
`buffers - 1` steps lies between start and wait, and a step lasts

    max(transfer, bundles, (latency + transfer + bundles) / buffers)

the last where latency binds: a DMA's bytes arrive `latency + transfer` after its start, the work of its own step
follows, and `buffers` steps share that. A step that starts between its wait and its work has a buffer less under way:
`(latency + transfer) / (buffers - 1)`. Latency is assumed, as no chip is at hand; bundles are taken not to stall;
steps of a sequence are taken to be equal, as the ring runs on across sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

from scripts.lab.tpu.chips import Chip

LATENCIES_S = (0.5e-6, 1e-6, 2e-6)  # of a DMA from HBM; what is told
USUAL_LATENCY_S = 1e-6  # what candidates and bars are judged at


@dataclass(frozen=True)
class Ring:
    """How a kernel's steps overlap with their DMAs."""

    buffers: int = 2
    starts_between: bool = False  # a step starts a DMA after its wait and before its work

    def step_seconds(self, transfer_s: float, work_s: float, latency_s: float) -> float:
        """A step whose bytes take `transfer_s` and whose bundles take `work_s`."""
        if self.starts_between and self.buffers > 1:
            stalled = (latency_s + transfer_s) / (self.buffers - 1)
        else:
            stalled = (latency_s + transfer_s + work_s) / self.buffers
        return max(transfer_s, work_s, stalled)

    def in_flight_bytes(self, step_bytes: int) -> int:
        """Bytes under way at most, `step_bytes` of them for each step."""
        return (self.buffers - (self.starts_between and self.buffers > 1)) * step_bytes


PAIR = Ring()  # a double buffer


@dataclass(frozen=True)
class Work:
    """What a sequence or a launch costs."""

    bundles: float  # all included
    num_bytes: float  # of KV that it has, read once
    steps: float  # a share of one where a step has several sequences
    ring: Ring

    def seconds(self, chip: Chip, latency_s: float) -> float:
        """By the model."""
        transfer_s, work_s = self.hbm_seconds(chip), self.bundles / chip.clock_hz
        return self.steps * self.ring.step_seconds(transfer_s / self.steps, work_s / self.steps, latency_s)

    def hbm_seconds(self, chip: Chip) -> float:
        """What HBM needs for the bytes alone."""
        return self.num_bytes / chip.hbm_bytes_per_s

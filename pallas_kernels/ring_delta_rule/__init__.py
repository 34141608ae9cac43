"""Gated delta rule and Kimi Delta Attention over ring states: a base state and what the tokens since then add to it."""

from pallas_kernels.ring_delta_rule.api import DeltaRing, RingDeltaOutput, ring_delta_rule

__all__ = ["DeltaRing", "RingDeltaOutput", "ring_delta_rule"]

"""Gated delta rule (Qwen3-Next, Qwen3.5) and Kimi Delta Attention over states in pages."""

from pallas_kernels.gated_delta_rule.api import DeltaOutput, gated_delta_rule

__all__ = ["DeltaOutput", "gated_delta_rule"]

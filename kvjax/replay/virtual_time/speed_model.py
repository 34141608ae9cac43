"""How long a step of the model would take: the clock of a replay without a model.

Flow:    tokens of a step -> [SpeedModel.step_seconds] -> virtual time

    step = overhead
         + prefill tokens / prefill rate                                  (compute bound)
         + [any decode] weights read + decode requests * per request + KV tokens attended * per KV token (memory bound)

The defaults are close to Llama 3 8B in bfloat16 on one H100: 16 GB of weights at about 2.7 TB/s, 131,072 bytes of KV a
token at the same rate, half of the peak arithmetic for prefill. They are arguments of `kvjax replay`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SpeedModel:
    """Speed of one deployment."""

    prefill_tokens_per_s: float = 30_000.0  # of prompts
    step_overhead_ms: float = 1.0  # every step
    decode_base_ms: float = 6.0  # a step that decodes: reading the weights once
    decode_us_per_request: float = 10.0  # each decoding request
    decode_ns_per_kv_token: float = 48.0  # each token that decoding requests attend to

    def __post_init__(self) -> None:
        if not self.prefill_tokens_per_s > 0:
            raise ValueError(f"expected prefill_tokens_per_s > 0, got {self.prefill_tokens_per_s}")
        for name in ("step_overhead_ms", "decode_base_ms", "decode_us_per_request", "decode_ns_per_kv_token"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"expected {name} >= 0, got {getattr(self, name)}")

    def step_seconds(self, num_prefill_tokens: int, num_decodes: int, num_kv_tokens: int) -> float:
        """Duration of a step; `num_kv_tokens` is what its decoding requests attend to together."""
        seconds = 1e-3 * self.step_overhead_ms + num_prefill_tokens / self.prefill_tokens_per_s
        if num_decodes:
            seconds += 1e-3 * self.decode_base_ms + 1e-6 * self.decode_us_per_request * num_decodes
            seconds += 1e-9 * self.decode_ns_per_kv_token * num_kv_tokens
        return seconds

    def describe(self) -> str:
        """The model in one line."""
        return (
            f"{self.prefill_tokens_per_s:,.0f} prefill tokens/s; a step costs {self.step_overhead_ms:g} ms, with "
            f"decoding {self.decode_base_ms:g} ms + {self.decode_us_per_request:g} us a request + "
            f"{self.decode_ns_per_kv_token:g} ns a KV token"
        )

"""The cases that are timed first, each with what it must reach.

Flow:    [HEADLINES] -> bench_case -> scripts/lab/bench
"""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.cases.find import case_types
from scripts.lab.bench.case import BenchCase, Sizes, bench_case

ATTENTION = "ragged_paged_attention"


@dataclass(frozen=True)
class Headline:
    """One case of an op's benchmark."""

    name: str
    op: str
    kind: str
    shape: str  # of the op's shapes.py
    page: int = 16
    dtype: str = "bfloat16"  # of the pages
    least_bandwidth: float | None = None  # share of a copy's, of the whole op
    least_tflops: float | None = None

    @property
    def bench_case(self) -> BenchCase:
        """The case, and the same with few tokens and heads."""
        case_type = case_types()[self.op]
        shape = next(shape for shape in case_type.shapes if shape.name == self.shape)
        return bench_case(case_type, self.kind, shape, Sizes("gpu", self.page, self.dtype))


HEADLINES = (
    Headline("decode 64 x 4k, page 16", ATTENTION, "decode", "llama3-8b", least_bandwidth=0.8),
    Headline("decode 64 x 4k, page 64", ATTENTION, "decode", "llama3-8b", page=64, least_bandwidth=0.8),
    Headline("decode 1 x 128k", ATTENTION, "decode-long", "llama3-8b", least_bandwidth=0.7),
    Headline("window 128 of 32k", ATTENTION, "decode-32k", "gpt-oss-120b-local"),
    Headline("prefill 8k, D 64", ATTENTION, "prefill", "llama3.2-1b"),
    Headline("prefill 8k, D 128", ATTENTION, "prefill", "llama3-8b", page=64, least_tflops=450),
    Headline("fp8 decode 64 x 4k", ATTENTION, "decode", "llama3-8b", dtype="float8_e4m3fn"),
    Headline("mixed 60 + 4 x 512", ATTENTION, "mixed", "llama3-8b"),
    Headline("latent decode 64 x 4k", "mla_paged_attention", "decode", "deepseek-v3", page=64),
    Headline("latent prefill 8k", "mla_paged_attention", "prefill", "deepseek-v2-lite", page=64),
    Headline("sparse decode 64 x 32k", "sparse_mla_attention", "decode-32k ratio 4", "deepseek-v4-flash", page=64),
    Headline("Mamba 2 decode 64", "selective_scan", "decode", "mamba2-2.7b"),
    Headline("Mamba 2 prefill 8k", "selective_scan", "prefill", "mamba2-2.7b"),
    Headline("delta rule decode 64", "gated_delta_rule", "decode", "qwen3-next-80b-a3b"),
    Headline("KV write of 8k", "kv_write", "prefill", "llama3-8b"),
)


def headline(name: str) -> Headline:
    """The one called so.

    Raises:
        ValueError: there is none.
    """
    found = next((one for one in HEADLINES if one.name == name), None)
    if found is None:
        raise ValueError(f"expected a case out of {[one.name for one in HEADLINES]}, got {name!r}")
    return found

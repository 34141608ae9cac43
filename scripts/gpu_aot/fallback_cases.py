"""What GPUs without kernels of their own are measured at: steps, cards, and what each may cost at most."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """A step of one op on one card."""

    name: str
    op: str
    rows: tuple[tuple[int, int, int], ...]  # (how many sequences, query tokens of each, tokens of each)
    card: str = "a100"
    dtype: str = "bfloat16"
    page_dtype: str | None = None  # of keys and values, or latents; None: `dtype`
    heads: int = 32
    backend: str = "triton"  # or "xla"
    most_launches: int = 120
    most_temporary_bytes: int = 256 * MIB
    most_spill_bytes: int = 128  # of a thread of a kernel in Triton, loaded back
    most_times: float = 4.0  # as long as what no path can do without: what the tables name read once, or the products

    @property
    def stored(self) -> str:
        """The dtype of keys and values, or latents."""
        return self.page_dtype or self.dtype

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """(query tokens, tokens) of every sequence."""
        return [(q_len, seq_len) for count, q_len, seq_len in self.rows for _ in range(count)]


CASES = (
    Case("decode 64 x 4k", "attention", ((64, 1, 4096),)),
    Case("decode 64 x 4k float32", "attention", ((64, 1, 4096),), card="h100", dtype="float32"),
    Case("decode 64 x 4k, fp8 pages", "attention", ((64, 1, 4096),), page_dtype="float8_e4m3fn"),
    Case("decode 64 x 4k, int8 pages", "attention", ((64, 1, 4096),), page_dtype="int8"),
    Case("decode 1 x 128k", "attention", ((1, 1, 131072),)),
    Case("decode 1 x 128k and 63 x 256", "attention", ((1, 1, 131072), (63, 1, 256))),
    Case("prefill 8k", "attention", ((1, 8192, 8192),)),
    Case("prefill 8k, fp8 pages", "attention", ((1, 8192, 8192),), page_dtype="float8_e4m3fn"),
    Case("prefill 8k float32", "attention", ((1, 8192, 8192),), card="h100", dtype="float32"),
    Case("MLA decode 64 x 4k 16 heads", "mla", ((64, 1, 4096),), heads=16),
    Case("MLA decode 64 x 4k 16 heads, fp8 pages", "mla", ((64, 1, 4096),), heads=16, page_dtype="float8_e4m3fn"),
    Case("MLA decode 64 x 4k 128 heads", "mla", ((64, 1, 4096),), heads=128),
    Case("Mamba 2 decode 64", "scan", ((64, 1, 1),)),
    Case("Mamba 2 prefill 8k", "scan", ((1, 8192, 8192),)),
    Case("gated delta decode 64", "delta", ((64, 1, 1),), backend="xla"),
    Case("indexer decode 64 x 32k", "indexer", ((64, 1, 32768),)),
    Case("indexer prefill 8k", "indexer", ((1, 8192, 8192),)),
    Case("compressor decode 64", "compressor", ((16, 1, 4096), (48, 1, 4095))),
    Case("compressor prefill 8k", "compressor", ((1, 8192, 8192),)),
    Case("decode 64 x 4k in XLA", "attention", ((64, 1, 4096),), backend="xla", most_launches=400),
    Case("MLA decode 64 x 4k 16 heads in XLA", "mla", ((64, 1, 4096),), heads=16, backend="xla", most_times=4.7),
)
SUBSET = ("decode 64 x 4k", "prefill 8k", "MLA decode 64 x 4k 16 heads", "Mamba 2 prefill 8k")  # what CI compiles

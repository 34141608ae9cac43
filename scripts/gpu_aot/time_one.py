"""The process that times: python -m scripts.gpu_aot.time_one [MODEL SHARDS PAGE SIZES] -> one line of JSON.

Without arguments: the name of this machine's card, or null. SIZES: a JSON object of kernel_gpu.Tuning's fields. A
process of its own, because a kernel that fails takes the CUDA context with it.

    {"decode": microseconds, "prefill": microseconds}     those parts of which SIZES has a size; both where it has none
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from pallas_kernels.gpu.mosaic import card_name
from pallas_kernels.ragged_paged_attention import kernel_gpu
from pallas_kernels.ragged_paged_attention.shapes import SHAPES
from scripts.gpu_aot.target import CARDS
from scripts.kernel_bench.case import BenchCase, Sizes
from scripts.kernel_bench.chain import Chain, num_rotated
from scripts.kernel_bench.ops import ragged_paged_attention
from scripts.kernel_bench.timing import wall_clock

PARTS = ("decode", "prefill")  # kinds of steps of scripts/kernel_bench/step.py
_REPEATS = 10


def part_sizes(part: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """The entries of `sizes` that have an influence on the part."""
    return {name: n for name, n in sizes.items() if name.startswith(part) or (part, name) == ("decode", "num_blocks")}


def bench_case(part: str, model: str, num_shards: int, page_size: int, *, small: bool = False) -> BenchCase:
    """The step that is timed."""
    shape = next(shape for shape in SHAPES if shape.name == model)
    return ragged_paged_attention.case(part, shape, Sizes("gpu", page=page_size, shards=num_shards, small=small))


def call(case: BenchCase, sizes: Mapping[str, int], pages: Any, rest: Any) -> tuple[Any, tuple[()]]:
    """The kernel alone, with `sizes` and no others."""
    q, step, sinks = rest
    setting = case.setting
    out, _ = kernel_gpu.ragged_paged_attention(
        q,
        pages,
        *step,
        mask=setting.step.mask,
        num_kv_heads=setting.num_kv_heads,
        sm_scale=setting.shape.sm_scale,
        soft_cap=setting.shape.soft_cap,
        sinks=sinks,
        k_scale=None,
        v_scale=None,
        return_lse=False,
        tuning=kernel_gpu.Tuning(**sizes),
    )
    return out, ()


def median_us(case: BenchCase, sizes: Mapping[str, int], cache_bytes: int) -> float:
    """Time of a call on the default device, over arguments that no cache holds."""
    rotated = [case.arguments(seed) for seed in range(num_rotated(case.work.num_bytes, cache_bytes))]
    chain = Chain(lambda pages, rest: call(case, sizes, pages, rest), rotated, writes=False)
    return wall_clock(chain, _REPEATS).median_us


def main(arguments: list[str]) -> None:
    """Prints the line."""
    card = card_name()
    if not arguments:
        print("\n" + json.dumps(card))
        return
    model, num_shards, page_size, text = arguments
    sizes = json.loads(text)
    if card not in CARDS:
        raise SystemExit(f"expected a card out of {sorted(CARDS)}, got {card}")
    parts = [part for part in PARTS if not sizes or part_sizes(part, sizes)]
    cases = {part: bench_case(part, model, int(num_shards), int(page_size)) for part in parts}
    print("\n" + json.dumps({part: median_us(case, sizes, CARDS[card].l2_bytes) for part, case in cases.items()}))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Cases of decoding steps: every kind of attention alone, and models of several groups.

The samples are whole steps. In the case `evicting` every free block is cached, so that each new block evicts one.
"""

from __future__ import annotations

from bench_host_cases.case import BenchCase, Side, case, sample_us
from bench_host_cases.shapes import NUM_STEPS, SHAPES
from bench_host_cases.sides import KVJAX

OF_VLLM = ("full", "hybrid", "mla", "chunked", "mamba_align")  # kinds that vLLM has under the same names


def num_steps(side: Side) -> int:
    """Fewer where a step takes milliseconds."""
    return NUM_STEPS if side is KVJAX else NUM_STEPS // 4


def step_samples(side: Side, shape: str, num_requests: int) -> list[float]:
    decoding = side.decoding(SHAPES[shape], num_requests)
    return sample_us(decoding.step, num_steps(side), decoding.next_step)


def evicting_step_samples(side: Side, num_requests: int) -> list[float]:
    decoding = side.decoding(SHAPES["full"], num_requests)
    decoding.cache_free_blocks()
    return sample_us(decoding.step, num_steps(side), decoding.next_step)


def step_with_tokens_samples(side: Side, num_requests: int) -> list[float]:
    step, prepare = side.decoding(SHAPES["full"], num_requests).step_with_tokens()
    return sample_us(step, num_steps(side), prepare)


def one_call_samples(side: Side, num_requests: int) -> list[float]:
    """Microseconds of an `allocate_slots` call, over a step of all requests."""
    decoding = side.decoding(SHAPES["full"], num_requests)
    step = decoding.step_by_calls if side is KVJAX else decoding.step
    return [sample / num_requests for sample in sample_us(step, num_steps(side), decoding.next_step)]


def cases() -> list[BenchCase]:
    """The steps by shape and number of requests, and one call."""
    return [
        *(
            case(f"decode_step/{name}/{n}", step_samples, name, n, has_vllm=name in OF_VLLM)
            for name in SHAPES
            for n in ((256, 1_024, 4_096) if name in ("full", "hybrid") else (1_024,))
        ),
        case("decode_step/full/1024/evicting", evicting_step_samples, 1_024),
        *(case(f"decode_step_with_tokens/full/{n}", step_with_tokens_samples, n) for n in (256, 1_024)),
        case("allocate_slots/decode", one_call_samples, 1_024),
    ]

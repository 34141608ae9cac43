"""Bytes of recurrent states that a decoding step moves where pages have rings, and what rings cost the cache.

    python -m scripts.lab.ring_bytes                        five hybrids, rings of 8, 16 and 32 tokens
    python -m scripts.lab.ring_bytes nemotron-3-nano-30b-a3b --rings 12

A step without rings reads a state and writes it. With a ring of R tokens it reads the state and the tokens held, from 1
to R, writes its own token, and the state every R steps. Convolutions are left out on both sides.
"""

from __future__ import annotations

import argparse
from math import prod

from kvjax.cli.options.types import int_list
from kvjax.configs import load_model_config
from kvjax.core.kinds.mamba import MambaSpec
from pallas_kernels.layouts import dtype_bits

MODELS = "qwen3-next-80b-a3b,kimi-linear-48b-a3b,granite-4.0-h-small,nemotron-3-nano-30b-a3b"


def bytes_of(shape: tuple[int, ...], dtype: str) -> int:
    """Of one array."""
    return prod(shape) * dtype_bits(dtype) // 8


def main() -> None:
    """Prints a line for each model and ring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="?", default=MODELS, help="names of kvjax.configs, with commas between")
    parser.add_argument("--rings", type=int_list, default=[8, 16, 32], help="tokens of a ring (8,16,32)")
    options = parser.parse_args()
    print("| model | state | a token | ring | bytes of a step, of those without | larger page |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name in options.models.split(","):
        specs = load_model_config(name).kv_cache_specs(16, None).values()
        spec = next(spec for spec in specs if isinstance(spec, MambaSpec))
        state = bytes_of(spec.shapes[-1], spec.dtypes[-1])
        token = sum(map(bytes_of, spec.token_shapes, spec.token_dtypes))
        for ring in options.rings:
            moved = state + state / ring + token * (ring + 3) / 2
            share, growth = moved / (2 * state), ring * token / spec.state_bytes
            print(f"| {name} | {state:,} | {token:,} | {ring} | {share:.2f} | {100 * growth:.0f} % |")


if __name__ == "__main__":
    main()

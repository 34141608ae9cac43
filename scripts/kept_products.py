"""What a projection kept in eight bits costs beside one in bfloat16: by XLA's estimate for a chip, or by this CPU.

Flow:    a kernel of each kind -> scaled_matmul -> XLA's cost analysis of the compiled product, or seconds

    python scripts/kept_products.py                           v6e, 8 x 4096 by 4096 x 57344
    python scripts/kept_products.py --chip cpu --outputs 14336

For a chip it needs libtpu (kvjax[tpu-aot]) and measures nothing. Temporaries are what XLA writes beside inputs and
output: a kernel that is converted whole would be among them. On a CPU the best of five runs is printed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.lab.tpu.chips import CHIPS, prepare_environment

if TYPE_CHECKING:
    import jax

prepare_environment()  # before jax is imported

BLOCK = 128
RUNS = 5
# A name, the kernel's dtype, and the inputs and outputs that share a scale (0: all of them); None: none has any.
KINDS: tuple[tuple[str, str, tuple[int, int] | None], ...] = (
    ("bfloat16", "bfloat16", None),
    ("float8, blocks of 128 x 128", "float8_e4m3fn", (BLOCK, BLOCK)),
    ("float8, a scale an output", "float8_e4m3fn", (0, 1)),
    ("int8, a scale an output", "int8", (0, 1)),
)


def product(block: tuple[int, int] | None, sizes: tuple[int, int]) -> Callable[..., jax.Array]:
    """x @ kernel in bfloat16, or over the scales of such blocks."""
    from kvjax.models.layers.linear import scaled_matmul

    if block is None:
        return lambda x, kernel: x @ kernel
    whole = (block[0] or sizes[0], block[1] or sizes[1])
    return lambda x, kernel, scale: scaled_matmul(x, kernel, scale, whole)


def shapes(dtype: str, block: tuple[int, int] | None, tokens: int, sizes: tuple[int, int]) -> list[Any]:
    """The product's arguments, as shapes."""
    import jax

    found = [jax.ShapeDtypeStruct((tokens, sizes[0]), "bfloat16"), jax.ShapeDtypeStruct(sizes, dtype)]
    if block is not None:
        parts = tuple(-(-size // (one or size)) for size, one in zip(sizes, block, strict=True))
        found.append(jax.ShapeDtypeStruct(parts, "float32"))
    return found


def estimate(function: Callable[..., jax.Array], arguments: list[Any], chip: str) -> str:
    """XLA's own figures for one of the chip's cores."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    device = topologies.get_topology_desc(topology_name=CHIPS[chip].topology, platform="tpu").devices[0]
    placed = [x.update(sharding=SingleDeviceSharding(device)) for x in arguments]
    compiled = jax.jit(function).lower(*placed).compile()
    costs, memory = compiled.cost_analysis(), compiled.memory_analysis()
    return (
        f"{costs['optimal_seconds'] * 1e6:6,.0f} us, {costs['bytes accessed'] / 1e6:6,.0f} MB moved, "
        f"{memory.temp_size_in_bytes / 1e6:6,.1f} MB of temporaries"
    )


def measure(function: Callable[..., jax.Array], arguments: list[Any]) -> str:
    """The best run on this machine."""
    import jax
    import jax.numpy as jnp

    given = [jnp.ones(x.shape, x.dtype) for x in arguments]
    compiled = jax.jit(function).lower(*given).compile()
    compiled(*given).block_until_ready()
    best = float("inf")
    for _ in range(RUNS):
        start = time.perf_counter()
        compiled(*given).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return f"{best * 1e3:6,.0f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", choices=[*CHIPS, "cpu"], default="v6e", help="default: v6e")
    parser.add_argument("--tokens", type=int, default=8, metavar="N", help="rows of the inputs; default: 8")
    parser.add_argument("--inputs", type=int, default=4096, metavar="N", help="of the projection; default: 4096")
    parser.add_argument("--outputs", type=int, default=57_344, metavar="N", help="of it; default: 57344")
    options = parser.parse_args()
    sizes = (options.inputs, options.outputs)
    print(f"{options.tokens} x {sizes[0]} by {sizes[0]} x {sizes[1]}, {options.chip}, jax {version('jax')}")
    for name, dtype, block in KINDS:
        function, arguments = product(block, sizes), shapes(dtype, block, options.tokens, sizes)
        found = measure(function, arguments) if options.chip == "cpu" else estimate(function, arguments, options.chip)
        print(f"{name:28} {found}", flush=True)


if __name__ == "__main__":
    main()

"""Whether a call's TPU kernels fit the chip's memories, read off their jaxprs, so that it holds for every op.

Flow:    op's kernel + arguments -> [with_room] -> "tpu", or the reference with a warning
         kernel + arguments -> [launches_of] -> bytes of scalar memory and VMEM of each pallas_call

Tracing a kernel costs nothing twice: jax keeps the trace for the call that follows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.backends import fall_back
from pallas_kernels.tpu.mosaic import LANES, SUBLANES, vmem_budget_bytes

# Of 1 MiB on every chip; the rest is for what the compiler keeps there.
SMEM_BUDGET_BYTES = 992 << 10


class Launch(NamedTuple):
    """What one pallas_call keeps in the core's memories."""

    name: str
    smem_bytes: int
    vmem_bytes: int
    vmem_limit_bytes: int  # that it asks for


def with_room(op: str, backend: str, kernel: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """ "tpu", or for a call that does not fit, "reference" where `backend` is "auto".

    Raises:
        NotImplementedError: `backend` is "tpu" and a launch does not fit.
    """
    reason = reason_of_memory(kernel, *arguments, **options)
    return "tpu" if reason is None else fall_back(op, backend, reason)


def reason_of_memory(kernel: Callable[..., Any], *arguments: Any, **options: Any) -> str | None:
    """Which launch of a call needs more memory than there is, in words; None if all fit."""
    for launch in launches_of(kernel, *arguments, **options):
        room = min(launch.vmem_limit_bytes, vmem_budget_bytes())
        if launch.smem_bytes > SMEM_BUDGET_BYTES:
            return (
                f"the TPU kernel {launch.name} keeps {launch.smem_bytes >> 10} KiB of tables in scalar memory, which "
                f"has {SMEM_BUDGET_BYTES >> 10}; call it for fewer tokens or sequences, or larger pages"
            )
        if launch.vmem_bytes > room:
            return (
                f"the TPU kernel {launch.name} keeps {launch.vmem_bytes >> 20} MiB in VMEM, of {room >> 20}; split "
                "the heads over more chips, or take smaller pages"
            )
    return None


def launches_of(kernel: Callable[..., Any], *arguments: Any, **options: Any) -> list[Launch]:
    """Every pallas_call of `kernel(*arguments, **options)`."""
    arrays = {name: x for name, x in options.items() if any(isinstance(y, jax.Array) for y in jax.tree.leaves(x))}
    static = {name: x for name, x in options.items() if name not in arrays}
    call = functools.partial(kernel, **static)
    traced = jax.make_jaxpr(lambda given, named: call(*given, **named))(arguments, arrays)
    return [_launch(equation.params) for equation in pallas_calls(traced.jaxpr)]


def pallas_calls(jaxpr: Any) -> Iterator[Any]:
    """The equations of all kernels in a jaxpr, those of its inner ones too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
            continue
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from pallas_calls(inner)


def _launch(params: dict[str, Any]) -> Launch:
    mapping, references = params["grid_mapping"], [v.aval for v in params["jaxpr"].invars]
    scalars = references[: mapping.num_index_operands]
    blocks = references[len(scalars) : len(references) - mapping.num_scratch_operands]
    scratch = references[len(references) - mapping.num_scratch_operands :]
    smem = sum(map(_scalar_bytes, scalars))
    vmem = 0
    for references, copies in ((blocks, 2), (scratch, 1)):  # the grid's pipeline has two of every block
        smem += copies * sum(_scalar_bytes(x) for x in references if _space(x) == "smem")
        vmem += copies * sum(_tiled_bytes(x) for x in references if _space(x) == "vmem")
    compiler = params["compiler_params"]
    compiler = compiler.get("mosaic_tpu", compiler) if isinstance(compiler, dict) else compiler
    name = params["name"] if "name" in params else params["name_and_src_info"].name
    return Launch(name, smem, vmem, compiler.vmem_limit_bytes)


def _space(reference: Any) -> str:
    """Where a reference lies: "smem", "vmem", "any", ...; a block whose place nobody named: in VMEM."""
    space = getattr(reference, "memory_space", None)
    if jnp.issubdtype(reference.dtype, jax.dtypes.extended):
        return "semaphore"
    name = str(getattr(space, "value", space)).lower()
    return "vmem" if name in ("none", "default") else name


def _scalar_bytes(reference: Any) -> int:
    """Rows of 128 words."""
    shape = reference.shape or (1,)
    return 4 * math.prod(shape[:-1]) * (-(-shape[-1] // LANES) * LANES)


def _tiled_bytes(reference: Any) -> int:
    """With whole lanes, and whole words of as many sublanes as the rows fill, up to 8."""
    shape: tuple[int, ...] = (1, 1, *reference.shape)
    *leading, rows, lanes = shape
    packing = 4 // reference.dtype.itemsize if reference.dtype.itemsize < 4 else 1
    words = -(-rows // packing)
    tile = min(SUBLANES, 1 << (words - 1).bit_length())
    words = -(-words // tile) * tile
    return 4 * math.prod(leading) * words * (-(-lanes // LANES) * LANES)

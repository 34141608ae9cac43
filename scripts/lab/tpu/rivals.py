"""Builds and compiles the attention kernels of a checkout of tpu-inference, in a process of its own.

    python -m scripts.lab.tpu.rivals CHECKOUT CHIP RIVAL '{"kv_heads": 8, ...}'      one line of JSON

Flow:    checkout + rival + sizes -> [compile_rival] -> what the compiler dumps, where LIBTPU_INIT_ARGS says

Nothing of theirs is in this repository: modules are imported from the path, with stand-ins for what they import of
their package beside kernels (log, environment, device name). Runs under the jax that they trace on.
"""

from __future__ import annotations

import contextlib
import json
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from scripts.lab.tpu.chips import CHIPS, prepare_environment

RIVALS = ("rpa_v3", "batched", "stacked")
_KERNELS = "tpu_inference.kernels"
_DEVICE_NAMES = {"TPU7x": "TPU v7", "TPU v6 lite": "TPU v6e", "TPU v5 lite": "TPU v5e", "TPU v5": "TPU v5p"}


@dataclass(frozen=True)
class RivalCase:
    """Sizes of one compilation."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page: int = 128
    dtype: str = "bfloat16"  # of the pages
    seqs: int = 64
    tokens: int = 64
    context: int = 8192
    num_pages: int = 4096
    mode: str = "decode"  # or "mixed": the launch that is compiled, where there is a choice
    block_sizes: tuple[int, ...] = ()  # of that launch, as the rival takes them; none: its own choice


def stand_in(checkout: Path) -> None:
    """Modules that the kernels import of their package beside kernels."""
    import jax

    def device_name(num_devices: int | None = None) -> str:
        kind = jax.devices()[0].device_kind
        return _DEVICE_NAMES.get(kind, kind)

    class Log:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_, **__: None

    package = _module("tpu_inference")
    package.__path__ = [str(checkout / "tpu_inference")]
    envs = _module("tpu_inference.envs", USE_BATCHED_RPA_SEQ_ON_LANE=False)
    envs.__getattr__ = lambda name: False  # type: ignore[method-assign]
    _module("tpu_inference.logger", init_logger=lambda *_: Log())
    _module("tpu_inference.utils", get_device_name=device_name, TPU_SECOND_LAST_MINOR=8)


def _module(name: str, **contents: Any) -> Any:
    module: Any = types.ModuleType(name)
    for key, value in contents.items():
        setattr(module, key, value)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
    return module


def build(rival: str, case: RivalCase) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(function, shapes of its arguments), the fourth of which is donated; while `jax.devices()` tells of the chip."""
    import jax
    import jax.numpy as jnp

    shape = jax.ShapeDtypeStruct
    kv = jnp.dtype(case.dtype)
    sizes = {"sm_scale": case.head_dim**-0.5}
    q = shape((case.tokens, case.heads, case.head_dim), jnp.bfloat16)
    new = shape((case.tokens, case.kv_heads, case.head_dim), kv)
    columns = -(-case.context // case.page)
    counts = ((case.seqs,), (case.seqs * columns,), (case.seqs + 1,), (3,))
    ints = tuple(shape(count, jnp.int32) for count in counts)
    call, cache_shape = _BUILDERS[rival](case, sizes)
    cache = shape(cache_shape(case.num_pages, case.page, case.kv_heads, case.head_dim, kv), kv)
    return call, (q, new, new, cache, *ints)


def _rpa_v3(case: RivalCase, options: dict[str, Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    kernel = import_module(f"{_KERNELS}.ragged_paged_attention.v3.kernel")
    if case.block_sizes:
        names = ("d_block_sizes",) if case.mode == "decode" else ("m_block_sizes", "p_block_sizes")
        options |= dict.fromkeys(names, case.block_sizes)
    return lambda *arguments: kernel.ragged_paged_attention(*arguments, **options), kernel.get_kv_cache_shape


def _batched(case: RivalCase, options: dict[str, Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    folder = f"{_KERNELS}.experimental.batched_rpa"
    configs, wrapper = import_module(f"{folder}.configs"), import_module(f"{folder}.wrapper")
    if case.block_sizes:
        name = "decode_block_sizes" if case.mode == "decode" else "prefill_block_sizes"
        options[name] = configs.BlockSizes(*case.block_sizes)
    layout = configs.KVLayout.HEAD_ALONG_SUBLANE
    launch = wrapper.kernel.rpa_kernel

    def one_launch(cu: Any, lens: Any, table: Any, plan: Any, q: Any, new: Any, cache: Any, *, cfgs: Any) -> Any:
        if str(cfgs.mode) != case.mode:  # the other takes minutes to compile
            return q, cache
        return launch(cu, lens, table, plan, q, new, cache, cfgs=cfgs)

    wrapper.kernel.rpa_kernel = one_launch

    def call(*arguments: Any) -> Any:
        return wrapper.ragged_paged_attention(*arguments, kv_layout=layout, **options)

    return call, lambda *sizes: wrapper.get_kv_cache_shape(*sizes, layout)


def _stacked(case: RivalCase, options: dict[str, Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    folder = f"{_KERNELS}.experimental.stacked_rpa"
    wrapper = import_module(f"{folder}.wrapper")
    if case.block_sizes:
        kind = "decode" if case.mode == "decode" else "prefill"
        options[f"{kind}_block_sizes"] = import_module(f"{folder}.{kind}.block_sizes").BlockSizes(*case.block_sizes)
    options["dispatch_hint"] = "decode_only" if case.mode == "decode" else "mixed_only"
    return lambda *arguments: wrapper.ragged_paged_attention(*arguments, **options), wrapper.get_kv_cache_shape


_BUILDERS: dict[str, Callable[[RivalCase, dict[str, Any]], tuple[Callable[..., Any], Callable[..., Any]]]] = {
    "rpa_v3": _rpa_v3,
    "batched": _batched,
    "stacked": _stacked,
}


@contextlib.contextmanager
def _as_chip(chip: str) -> Iterator[Any]:
    """A mesh of one `chip`, which `jax.devices()` tells of meanwhile: kernels ask it for their sizes."""
    import jax
    from jax.experimental import topologies

    device = topologies.get_topology_desc(topology_name=CHIPS[chip].topology, platform="tpu").devices[0]
    mesh, devices = jax.sharding.Mesh([device], ("x",)), jax.devices
    jax.devices = lambda *given, **named: devices(*given, **named) if given or named else [device]
    try:
        with jax.set_mesh(mesh):
            yield mesh
    finally:
        jax.devices = devices


def compile_rival(checkout: Path, chip: str, rival: str, case: RivalCase) -> dict[str, Any]:
    """Compiles; what is told is the launch's memory."""
    import jax

    stand_in(checkout)
    with _as_chip(chip) as mesh:
        call, arguments = build(rival, case)
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        placed = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in arguments]
        compiled = jax.jit(call, donate_argnums=(3,)).lower(*placed).compile()
    return {"jax": jax.__version__, "temp_bytes": compiled.memory_analysis().temp_size_in_bytes}


def main(arguments: list[str]) -> None:
    """Prints a line of JSON."""
    checkout, chip, rival, sizes = arguments
    given = json.loads(sizes)
    case = RivalCase(**{**given, "block_sizes": tuple(given.get("block_sizes", ()))})
    print("\n" + json.dumps(compile_rival(Path(checkout), chip, rival, case)))


if __name__ == "__main__":
    prepare_environment()
    main(sys.argv[1:])

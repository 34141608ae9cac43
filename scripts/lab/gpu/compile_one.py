"""The process that compiles: python -m scripts.lab.gpu.compile_one CARD OP DUMP [name=value ...] -> lines of JSON."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.lab.gpu.ceiling import Ceiling
from scripts.lab.gpu.launches import count_launches
from scripts.lab.gpu.resources import count_copies, count_instructions, parse_ptxas, parse_shared_memory
from scripts.lab.gpu.target import CARDS, Card, prepare_environment


def compile_case(card: str, op: str, settings: list[str]) -> dict[str, Any]:
    """Compiles; a record of the module around the kernels, of which the dumps say the rest."""
    import jax
    from jax.experimental import topologies

    from scripts.lab.gpu import layer_case
    from scripts.lab.gpu.operations import operation_of

    operation = operation_of(op, settings)
    topology = topologies.get_topology_desc(platform="cuda", target_config=CARDS[card].config, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    on_card = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    arguments = jax.tree.map(lambda a: on_card(a.shape, a.dtype), operation.arguments)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(operation.call, donate_argnums=operation.donated).lower(*arguments)
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    donated = [array for i in operation.donated for array in jax.tree.leaves(operation.arguments[i])]
    record = {
        "module": op,
        "donated_bytes": sum(array.size * array.dtype.itemsize for array in donated),
        "aliased_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "copies": sum(count_copies(text, array.shape) for array in donated),
    }
    if operation.layers:
        counts = {step: count_launches(text, step, "attend") for step in layer_case.STEPS}
        record["launches_by_layer"] = {step: -(-count // operation.layers) for step, count in counts.items()}
        record["launches_to_plan"] = {step: count_launches(text, step, "plan") for step in layer_case.STEPS}
    return record


def tool(name: str) -> Path | None:
    """A program of the CUDA toolkit's wheels."""
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else list(spec.submodule_search_locations or ())
    return next((path for root in roots for path in sorted(Path(root).glob(f"*/bin/{name}"))), None)


def page_bytes(op: str, settings: list[str]) -> int:
    """Size of a number in a case's pages; what is not said to be of 8 bits has 16."""
    from scripts.lab.gpu.operations import case_of

    dtype = getattr(case_of(op, settings), "dtype", "")
    return 1 if dtype.startswith(("float8", "int8")) else 2


def describe(dump: Path, ptx: Path, ceiling: Callable[[str, str], dict[str, Any] | None]) -> list[dict[str, Any]]:
    """The kernel of one dumped PTX file, as Mosaic GPU had it compiled and as ptxas compiles it alone.

    `ceiling` of (kernel, disassembly) goes with each.
    """
    resources = ptx.with_suffix(".resources.txt")
    shared = parse_shared_memory(resources.read_text()) if resources.exists() else None
    log, sass = ptx.with_suffix(".ptxas").read_text(), ""
    for path in sorted(dump.glob(f"{ptx.stem}.sass*")):
        sass = path.read_text()
    found = [_record("linked" if "'setmaxnreg' ignored" in log else "alone", log, sass, shared, ceiling)]
    ptxas, disassembler = tool("ptxas"), tool("nvdisasm")
    if found[0]["how"] == "linked" and ptxas is not None and disassembler is not None:
        cubin = ptx.with_suffix(".cubin")
        command = [str(ptxas), "-v", "-arch=sm_90a", "-O3", str(ptx), "-o", str(cubin)]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        sass = subprocess.run([str(disassembler), "-c", str(cubin)], check=True, capture_output=True, text=True).stdout
        found.append(_record("alone", log, sass, shared, ceiling))
    return found


def _record(
    how: str, log: str, sass: str, shared: int | None, ceiling: Callable[[str, str], dict[str, Any] | None]
) -> dict[str, Any]:
    (usage,) = parse_ptxas(log)
    found = {"sass": count_instructions(sass), "ceiling": ceiling(usage.kernel, sass)}
    return {"how": how, "shared_bytes": shared, **dataclasses.asdict(usage), **found}


def _ceiling(card: Card, number_bytes: int, kernel: str, sass: str) -> dict[str, Any] | None:
    found = Ceiling.of(kernel, sass, card, number_bytes)
    return None if found is None else found.as_record(card)


if __name__ == "__main__":
    folder = Path(sys.argv[3])
    prepare_environment(str(folder))
    print(json.dumps(compile_case(sys.argv[1], sys.argv[2], sys.argv[4:])))
    ceiling = functools.partial(_ceiling, CARDS[sys.argv[1]], page_bytes(sys.argv[2], sys.argv[4:]))
    for file in sorted(folder.glob("*.ptx")):
        for record in describe(folder, file, ceiling):
            print(json.dumps(record))

"""The process that compiles: python -m scripts.tpu_aot.compile_one CHIP OP [name=value ...] -> one line of JSON."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from typing import Any

from scripts.tpu_aot.chips import CHIPS, prepare_environment

prepare_environment()


def parse_case(case_type: type, settings: list[str]) -> Any:
    """A case with some fields set by name=value."""
    fields = {field.name: field for field in dataclasses.fields(case_type)}
    values = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in fields:
            raise ValueError(f"expected a setting out of {sorted(fields)}, got {setting!r}")
        values[name] = type(fields[name].default)(text)
    return case_type(**values)


def scoped_memory(text: str) -> list[int]:
    """Bytes of VMEM of each kernel in the compiled module's text."""
    pattern = r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"'
    return [int(x) for x in re.findall(pattern, text)]


def compile_case(chip: str, op: str, settings: list[str]) -> dict[str, Any]:
    """Compiles, and says what the compiler said about memory."""
    import jax
    from jax.experimental import topologies

    from scripts.tpu_aot.operations import OPERATIONS

    case_type, build = OPERATIONS[op]
    call, arguments = build(parse_case(case_type, settings))
    device = topologies.get_topology_desc(topology_name=CHIPS[chip].topology, platform="tpu").devices[0]
    mesh = jax.sharding.Mesh([device], ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments)
    with jax.set_mesh(mesh):
        compiled = jax.jit(call).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    try:
        vmem = scoped_memory(compiled.as_text())
    except jax.errors.JaxRuntimeError:  # some modules for v7x: libtpu's HLO is newer than jaxlib's reader
        vmem = []
    return {
        "vmem_bytes": max(vmem, default=None),
        "temp_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
    }


if __name__ == "__main__":
    print("\n" + json.dumps(compile_case(sys.argv[1], sys.argv[2], sys.argv[3:])))

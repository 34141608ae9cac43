"""The process that compiles.

python -m scripts.lab.tpu.compile_one CHIP OP [name=value ...]    one line of JSON
python -m scripts.lab.tpu.compile_one --serve                     one for each line ["CHIP", "OP", ...] that it reads
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import sys
from typing import Any

from scripts.lab.tpu.chips import CHIPS, prepare_environment
from scripts.lab.tpu.compiler import last_lines

prepare_environment()


def vmem_bytes(text: str) -> dict[str, int]:
    """Bytes of VMEM of each Pallas kernel in the compiled module's text."""
    pattern = (
        r'%(\S+) = \S.* custom-call\(.*custom_call_target="tpu_custom_call".*'
        r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"'
    )
    return {re.sub(r"\.\d+$", "", name): int(size) for name, size in re.findall(pattern, text)}


def smem_bytes(jaxpr: Any) -> dict[str, int]:
    """Bytes of scalar-prefetch operands of each Pallas kernel in a jaxpr, which lie in scalar memory."""
    found = {}
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            mapping = equation.params["grid_mapping"]
            first = mapping.num_dynamic_grid_bounds
            scalars = equation.invars[first : first + mapping.num_index_operands]
            found[_kernel_name(equation.params)] = sum(4 * math.prod(x.aval.shape) for x in scalars)
        for value in equation.params.values():
            for part in value if isinstance(value, tuple) else (value,):  # branches come as a tuple
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns") and equation.primitive.name != "pallas_call":
                    found.update(smem_bytes(inner))
    return found


def _kernel_name(params: dict[str, Any]) -> str:
    return params["name"] if "name" in params else params["name_and_src_info"].name


def compile_case(chip: str, op: str, settings: list[str]) -> dict[str, Any]:
    """Compiles, and says what the compiler said about memory; with `slabs=N` of pages in slabs (`lab.slab_shapes`)."""
    import jax
    from jax.experimental import topologies

    from pallas_kernels.cases.case import argument_shapes
    from scripts.lab.compiled import case_of
    from scripts.lab.slab_shapes import in_slabs, of_slabs

    case = case_of("tpu", op, settings)
    call, arguments = functools.partial(case.call, "tpu"), argument_shapes(case)
    if slabs := of_slabs(settings):
        arguments = in_slabs(arguments, packs=True, **slabs)
    donated = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arguments.pages)) if case.writes else 0
    device = topologies.get_topology_desc(topology_name=CHIPS[chip].topology, platform="tpu").devices[0]
    mesh = jax.sharding.Mesh([device], ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments)
    with jax.set_mesh(mesh):
        smem = smem_bytes(jax.make_jaxpr(call)(*arguments).jaxpr)
        compiled = jax.jit(call, donate_argnums=0 if case.writes else ()).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    try:
        vmem = vmem_bytes(compiled.as_text())
    except jax.errors.JaxRuntimeError:  # some modules for v7x: libtpu's HLO is newer than jaxlib's reader
        vmem = {}
    return {
        "kernels": {name: {"smem_bytes": size, "vmem_bytes": vmem.get(name)} for name, size in smem.items()},
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "donated_bytes": donated,
        "code_bytes": memory.generated_code_size_in_bytes,
        "token_bytes": getattr(case, "token_bytes", None),
    }


def serve() -> None:
    """Answers each line of standard input with {"memory": ...} or {"error": ...}, until there is no more."""
    import jax

    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libtpu prints is no answer
    for line in sys.stdin:
        chip, op, *settings = json.loads(line)
        try:
            answer = {"memory": compile_case(chip, op, settings)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {last_lines(str(error))}"}
        jax.clear_caches()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__" and sys.argv[1:] == ["--serve"]:
    serve()
elif __name__ == "__main__":
    print("\n" + json.dumps(compile_case(sys.argv[1], sys.argv[2], sys.argv[3:])))

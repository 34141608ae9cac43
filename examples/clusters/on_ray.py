"""Ray: a process on each of some nodes, all made anew when one fails.

    ray job submit -- python examples/clusters/on_ray.py NODES GPUS -- python examples/clusters/serve.py --folder ...

Each process is a child of a Ray task, so that its end, however it comes, ends no worker of Ray's. The folder is on a
file system that all nodes share.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

MOST_STARTS = 11


@ray.remote(max_retries=0)
def free_address() -> str:
    """Where process 0 may listen, of the node that this runs on."""
    with socket.create_server(("", 0)) as free:
        return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"


@ray.remote(max_retries=0)
def run(program: list[str], address: str, number: int, index: int) -> None:
    """One process; raises CalledProcessError if it fails."""
    told = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(number), "JAX_PROCESS_ID": str(index)}
    subprocess.run(program, env=os.environ | told, check=True)


def start(program: list[str], num_nodes: int, num_gpus: int) -> bool:
    """Whether all processes have ended well."""
    group = placement_group([{"CPU": 1, "GPU": num_gpus}] * num_nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready())

    def on(index: int) -> dict[str, object]:
        return {"num_gpus": num_gpus, "scheduling_strategy": PlacementGroupSchedulingStrategy(group, index)}

    try:
        address = ray.get(free_address.options(**on(0)).remote())
        ray.get([run.options(**on(i)).remote(program, address, num_nodes, i) for i in range(num_nodes)])
        return True
    except ray.exceptions.RayError as error:
        print(f"a process has failed; all start again: {error}", file=sys.stderr)
        return False
    finally:
        remove_placement_group(group)  # which ends the tasks that are left


def main() -> int:
    """As the module says."""
    num_nodes, num_gpus, program = int(sys.argv[1]), int(sys.argv[2]), sys.argv[sys.argv.index("--") + 1 :]
    ray.init()
    return 0 if any(start(program, num_nodes, num_gpus) for _ in range(MOST_STARTS)) else 1


if __name__ == "__main__":
    sys.exit(main())

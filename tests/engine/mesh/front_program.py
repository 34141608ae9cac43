"""Run by tests in processes of their own: a mesh whose requests come through one front, and of which a process dies.

    python -m tests.engine.mesh.front_program FOLDER [--die PROCESS MODULE:CLASS.METHOD COUNT] AXIS=SIZE ...

Process 0 submits the requests of `requests_of` that are neither answered nor owed, and writes each answer as a line of
`answers.jsonl`. Where it is told to, a process kills itself at the COUNT-th call of a method, at the first start alone.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import jax

from kvjax.device import join_processes
from kvjax.engine import GenerationResult, LLMEngine, ProcessFront, SamplingParams
from kvjax.models import load_model
from kvjax.tiers.config import TierConfig
from tests.engine.engines import base_config
from tests.models.golden_models import goldens_of, model_folder

NAME = "llama"
NUM_TOKENS = 32
HOST_BYTES = 1 << 24


def requests_of() -> dict[str, tuple[list[int], SamplingParams]]:
    """Each prompt of the family greedily, and one of them three times by chance."""
    goldens = goldens_of(NAME)
    greedy = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    found = {f"greedy-{i}": (golden.prompt.tolist(), greedy) for i, golden in enumerate(goldens)}
    chance = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.7, n=3, seed=5)
    return found | {"chance": (goldens[0].prompt.tolist(), chance)}


def die_at(place: str, count: int) -> None:
    """Kills this process at the `count`-th call of a method, before it does anything."""
    module, names = place.split(":")
    owner: Any = importlib.import_module(module)
    *path, method = names.split(".")
    for name in path:
        owner = getattr(owner, name)
    original, left = getattr(owner, method), [count]

    @functools.wraps(original)
    def counting(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            print(f"dies at {time.monotonic()}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, method, counting)


def write_answer(path: Path, result: GenerationResult) -> None:
    values = [result.request_id, result.output_token_ids.tolist(), len(result.logprobs)]
    with path.open("a") as file:
        file.write(f"{json.dumps(values)}\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("axes", nargs="+")
    parser.add_argument("--die", nargs=3, metavar=("PROCESS", "PLACE", "COUNT"))
    args = parser.parse_args()
    join_processes()
    if args.die and int(args.die[0]) == jax.process_index() and os.environ.get("KVJAX_NUM_RESTARTS") == "0":
        die_at(args.die[1], int(args.die[2]))
    axes = {name: int(size) for name, size in (axis.split("=") for axis in args.axes)}
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes))
    model = load_model(model_folder(NAME), "float32", mesh)
    tiers = TierConfig(host_bytes=HOST_BYTES, write_through=True)
    config = base_config(NAME, num_blocks=40, block_size=8 // axes.get("context", 1), max_num_seqs=4, tiers=tiers)
    engine = LLMEngine(model, config, mesh=mesh)
    answers = args.folder / "answers.jsonl"
    front = ProcessFront(engine, args.folder, on_result=functools.partial(write_answer, answers))
    if front.takes_requests:
        print(f"took up {len(front.taken_up)}", flush=True)
        answered = [json.loads(line)[0] for line in answers.read_text().splitlines()] if answers.exists() else []
        for name, (prompt, params) in requests_of().items():
            if name not in answered and name not in front.taken_up:
                front.submit(prompt, params, request_id=name)
        front.close()
    front.serve()
    engine.check_invariants()


if __name__ == "__main__":
    main()

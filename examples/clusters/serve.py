"""Prompts of a file to answers in a file, by an engine over all devices of all processes; every process runs this.

    kvjax launch -n 2 --cpu-devices 4 -- python examples/clusters/serve.py --folder /tmp/serve

The folder has `requests.jsonl`, a line each of {"id": "a", "prompt_token_ids": [1, 2, 3], "max_tokens": 16}. Answers go
to `answers.jsonl`, and what is owed to `owed-*.jsonl`. It may be started again at any time: what is answered is not
answered again, and what is owed goes on where it was. A server would call `submit` from its own handlers in place of
`read_requests`.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import jax

from kvjax.demo import demo_model_path
from kvjax.device import join_processes
from kvjax.engine import EngineConfig, GenerationResult, LLMEngine, ProcessFront, SamplingParams
from kvjax.models import load_model


def answered_in(path: Path) -> set[str]:
    """Ids of the requests that have an answer."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {json.loads(line)["id"] for line in lines}


def read_requests(front: ProcessFront, folder: Path) -> None:
    """Submits what is neither answered nor owed."""
    known = answered_in(folder / "answers.jsonl") | set(front.taken_up)
    for line in (folder / "requests.jsonl").read_text().splitlines():
        request = json.loads(line)
        if request["id"] not in known:
            params = SamplingParams(max_tokens=request.get("max_tokens", 16), temperature=0.0)
            front.submit(request["prompt_token_ids"], params, request_id=request["id"])


def main() -> None:
    """As the module says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="of requests and answers, the same in all processes")
    parser.add_argument("--owed", type=Path, help="folder for what this process owes (default: the same)")
    parser.add_argument("--model", type=Path, default=demo_model_path(), help="a Hugging Face folder")
    args = parser.parse_args()

    if not join_processes():
        jax.distributed.initialize()  # which finds the others on TPU pods, under Slurm and MPI
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    config = EngineConfig(num_blocks=200, max_model_len=512, max_buckets=1)
    engine = LLMEngine(load_model(args.model, mesh=mesh), config, mesh=mesh)

    def write_answer(result: GenerationResult) -> None:
        values = {"id": result.request_id, "token_ids": result.output_token_ids.tolist()}
        with (args.folder / "answers.jsonl").open("a") as file:
            file.write(f"{json.dumps(values)}\n")
            file.flush()
            os.fsync(file.fileno())

    front = ProcessFront(engine, args.owed or args.folder, on_result=write_answer)
    if front.takes_requests:
        read_requests(front, args.folder)
        front.close()
    front.serve()


if __name__ == "__main__":
    main()

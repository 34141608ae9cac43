"""Run by a test in two processes: tasks of process 0 read an engine that both run, through one front."""

from __future__ import annotations

import asyncio
import sys
import threading

import jax

from kvjax.device import join_processes
from kvjax.engine import AsyncProcessFront, LLMEngine, ProcessFront, SamplingParams
from kvjax.models import load_model
from tests.engine.engines import assert_no_leak, base_config
from tests.models.golden_models import goldens_of, model_folder

NAME = "llama"
GREEDY = SamplingParams(max_tokens=16, temperature=0.0)


async def read(requests: AsyncProcessFront) -> None:
    """All prompts at once, while another reader leaves."""
    goldens = goldens_of(NAME)
    leaver = requests.generate(goldens[0].prompt, SamplingParams(max_tokens=70, temperature=0.0))
    await anext(leaver)
    tasks = [asyncio.create_task(requests.complete(golden.prompt, GREEDY)) for golden in goldens]
    await leaver.aclose()
    for golden, (result,) in zip(goldens, await asyncio.gather(*tasks), strict=True):
        assert result.output_token_ids.tolist() == golden.greedy[:16].tolist()
    print("all read", flush=True)


def main() -> None:
    """As the module says; the argument is the folder of journals."""
    join_processes()
    mesh = jax.make_mesh((2,), ("tensor",))
    engine = LLMEngine(load_model(model_folder(NAME), "float32", mesh), base_config(NAME, num_blocks=60), mesh=mesh)
    front = ProcessFront(engine, sys.argv[1])
    if front.takes_requests:

        def take() -> None:
            try:
                asyncio.run(read(AsyncProcessFront(front)))
            finally:
                front.close()

        threading.Thread(target=take).start()
    front.serve()
    assert_no_leak(engine)


if __name__ == "__main__":
    main()

"""vLLM's engine, its core in a spawned process, with vLLM's manager and with kvjax's as the environment asks for it.

Usage:   DIR/python scripts/vllm_conformance/engine.py [--seeds N], by the wrapper that vllm_conformance.sh writes
Flow:    KVJAX_VLLM=0, then 1 -> a process each: vllm.LLM over `paged_tokens.PagedTokens` -> tokens, hits -> a table

Rounds of prompts that share beginnings, more than the pool holds: chunks, preemptions, evictions and hits. The tokens
must be equal, and kvjax's line must be in the log of the second alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LINE = "manages the KV cache of vllm"
MODEL = "facebook/opt-125m"  # a folder of shapes; no weight is read
SIZES = {"max_model_len": 256, "num_gpu_blocks_override": 40, "block_size": 16, "max_num_batched_tokens": 64}


def rounds_of(seed: int) -> list[list[list[int]]]:
    """Five rounds of a dozen prompts, each of one of three beginnings and an end of its own."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(3, 900) for _ in range(rng.randrange(20, 120))] for _ in range(3)]
    return [
        [rng.choice(beginnings) + [rng.randrange(3, 900) for _ in range(rng.randrange(1, 60))] for _ in range(12)]
        for _ in range(5)
    ]


def generate(seed: int, path: Path) -> None:
    """One engine: tokens and hits of each prompt, to a file."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=MODEL,
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        max_num_seqs=8,
        distributed_executor_backend="paged_tokens.PagedTokens",
        **SIZES,
    )
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, detokenize=False)
    answers = []
    for prompts in rounds_of(seed):
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        answers += [(list(output.outputs[0].token_ids), output.num_cached_tokens) for output in outputs]
    path.write_text(json.dumps(answers))


def run(seed: int, is_kvjax: bool) -> tuple[list[Any], str]:
    """Answers and log of a process that asks for kvjax or not."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answers.json"
        environment = os.environ | {
            "KVJAX_VLLM": str(int(is_kvjax)),
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        }
        command = [sys.executable, __file__, "--generate", str(path), "--seed", str(seed)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        log = done.stdout + done.stderr
        if done.returncode:
            sys.exit(f"{log}\nseed {seed}: rc {done.returncode}")
        return json.loads(path.read_text()), log


def main() -> int:
    """Both engines for each seed, and a table; 1 if tokens differ, or a line is missing or too many."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--generate", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.generate is not None:
        generate(args.seed, args.generate)
        return 0
    print("| seed | prompts | tokens equal | hit tokens, vLLM's | kvjax's |\n|---|---|---|---|---|")
    failed = False
    for seed in range(args.seeds):
        (own, own_log), (ours, our_log) = run(seed, False), run(seed, True)
        is_equal = [tokens for tokens, _ in own] == [tokens for tokens, _ in ours]
        hits = [sum(num_hits for _, num_hits in answers) for answers in (own, ours)]
        print(f"| {seed} | {len(own)} | {is_equal} | {hits[0]:,} | {hits[1]:,} |", flush=True)
        failed |= not is_equal or LINE in own_log or LINE not in our_log
    lines = [line[line.index("kvjax ") :] for line in our_log.splitlines() if LINE in line]
    print("\n".join(["", *lines]))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())

"""Stacks' own reference attention over steps that kvjax planned and an adapter converted, against kvjax's reference.

    python scripts/stack_references.py tpu_inference PATH      PATH: a checkout's sources or an unpacked wheel
    python scripts/stack_references.py tpu_inference PATH --seeds 5

Flow:    random steps -> converted -> the stack's reference from PATH -> [stack_references] -> a line a case

A line has the largest difference of an output and of a page, of a case over all seeds; the exit status is 1 where one
is above 1e-5. Pages are compared but for page 0, which takes what no request owns.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

STACKS = ("easydel", "sglang_jax", "tpu_inference")
TOLERANCE = 1e-5


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; 1 where a difference is above the tolerance."""
    parser = argparse.ArgumentParser(description="Run a stack's reference attention over converted steps.")
    parser.add_argument("stack", choices=STACKS)
    parser.add_argument("path", type=Path)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args(arguments)
    checks = importlib.import_module(f"scripts.stack_checks.{options.stack}")
    worst: dict[str, list[float]] = {}
    for seed in range(options.seeds):
        for case, (step, out, pages) in checks.answers(options.path, seed):
            line = worst.setdefault(case, [0, 0.0, 0.0])
            line[0] += 1
            line[1] = max(line[1], float(np.abs(out[: len(step.out)] - step.out).max()))
            for ours, theirs in zip(step.written, pages, strict=True):
                line[2] = max(line[2], float(np.abs(ours[1:] - theirs[1:]).max()))
    print(f"{'case':28} {'steps':>5} {'outputs':>9} {'pages':>9}")
    for case, (count, outputs, written) in worst.items():
        print(f"{case:28} {count:5.0f} {outputs:9.1e} {written:9.1e}")
    return int(any(max(line[1:]) > TOLERANCE for line in worst.values()))


if __name__ == "__main__":
    sys.exit(main())

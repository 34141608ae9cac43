"""Run by test_on_gpu.py in a process of its own: greedy tokens of the demo model on the default device, as JSON."""

from __future__ import annotations

import json

import jax

from kvjax.engine import SamplingParams
from tests.engine.engines import NUM_GREEDY_TOKENS, golden_prompts, make_engine


def greedy_tokens() -> list[list[int]]:
    """Those of every golden prompt of the demo model."""
    params = SamplingParams(max_tokens=NUM_GREEDY_TOKENS, temperature=0.0)
    results = make_engine("demo").generate(golden_prompts("demo"), params)
    return [result.output_token_ids.tolist() for result in results]


def main() -> None:
    """Prints {"platform": the default device's, "tokens": a list per golden prompt}."""
    # By itself JAX multiplies float32 in TF32 on a GPU, which moves logits by as much as lies between the best two.
    jax.config.update("jax_default_matmul_precision", "float32")
    print("\n" + json.dumps({"platform": jax.default_backend(), "tokens": greedy_tokens()}))


if __name__ == "__main__":
    main()

"""The engine in bfloat16, its kernels on the card next to the reference on the CPU.

    python -m scripts.first_light.programs.engine

A Llama of random weights with heads of 128 numbers, which every kernel takes. Both engines give the log-probability
of each token of the same prompts (chunked, so that prefill, mixed and decode steps all run) and eight greedy tokens.
The CPU's is a process of its own. They differ by the rounding of bfloat16 alone: `LIMIT` nats.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LIMIT = 0.1
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
}


def generate() -> dict[str, Any]:
    """Log-probabilities of the prompts' tokens and greedy tokens, on the default device."""
    import jax
    import numpy as np
    from flax import nnx

    from kvjax.engine import EngineConfig, LLMEngine, SamplingParams
    from kvjax.models.config import ModelConfig
    from kvjax.models.registry import build_model
    from kvjax.models.save import save_weights

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(_CONFIG))
        model = build_model(ModelConfig.from_folder(folder), dtype="bfloat16", rngs=nnx.Rngs(0))
        save_weights(model, folder, "bfloat16")
        sizes = {"block_size": 16, "num_blocks": 256, "max_model_len": 512, "max_num_seqs": 8}
        config = EngineConfig(**sizes, max_num_batched_tokens=128, max_buckets=3, max_logprobs=1)
        engine = LLMEngine.from_folder(folder, config, dtype="bfloat16")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, _CONFIG["vocab_size"], length).tolist() for length in (5, 64, 200, 301)]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
    results = engine.generate(prompts, params)
    return {
        "platform": jax.default_backend(),
        "tokens": [result.output_token_ids.tolist() for result in results],
        "logprobs": [result.prompt_logprobs.logprobs[1:].tolist() for result in results if result.prompt_logprobs],
    }


def on_cpu() -> dict[str, Any]:
    """The same in a process that sees no card."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "scripts.first_light.programs.engine", "--raw"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main(arguments: list[str]) -> int:
    """Compares."""
    if "--raw" in arguments:
        print("\n" + json.dumps(generate()))
        return 0
    from scripts.first_light.programs.answer import answer

    here, there = generate(), on_cpu()
    pairs = [
        (a, b)
        for mine, other in zip(here["logprobs"], there["logprobs"], strict=True)
        for a, b in zip(mine, other, strict=True)
    ]
    worst = max(abs(a - b) for a, b in pairs)
    equal = sum(a == b for a, b in zip(here["tokens"], there["tokens"], strict=True))
    words = f"{here['platform']}: {len(pairs)} log-probabilities within {worst:.3g} nats, {equal} of 4 outputs equal"
    return answer(words, is_right=worst <= LIMIT, worst=worst, equal=equal)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

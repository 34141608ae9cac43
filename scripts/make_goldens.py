"""Makes the committed goldens of the model tests: tiny random models and what Hugging Face transformers computes.

Flow:    seeds -> tiny Llama, Qwen3, Gemma 3 folders; the demo model -> [make_goldens] -> tests/models/goldens/*

    pip install 'kvjax[oracle]' && python scripts/make_goldens.py [llama qwen3 gemma3 demo]

Weights are rounded to bfloat16, so the files are half as large and float32 still loads them exactly. Prompts are kept
only if the two best logits differ by more than MIN_GAP at every greedy step, so that any correct float32
implementation picks the same tokens. tests/models/golden_models.py reads what this writes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

GOLDENS = Path(__file__).parents[1] / "tests" / "models" / "goldens"
MIN_GAP = 1e-3
NUM_GREEDY_TOKENS = 32
SHARED_PREFIX_TOKENS = 37
PROMPT_TOKENS = (45, 61, 98, 37, 80, 53)  # the first four begin with the shared prefix
TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def tiny_configs() -> dict[str, transformers.PreTrainedConfig]:
    """One config per family; every feature that its decoder has is on."""
    llama3_rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return {
        "llama": transformers.LlamaConfig(**TINY, num_hidden_layers=3, rope_parameters=llama3_rope),
        "qwen3": transformers.Qwen3Config(
            **TINY | {"num_attention_heads": 4, "num_key_value_heads": 2},
            num_hidden_layers=3,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        ),
        "gemma3": transformers.Gemma3TextConfig(
            **TINY,
            num_hidden_layers=7,
            sliding_window=16,
            query_pre_attn_scalar=24,
            final_logit_softcapping=30.0,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
    }


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights that keep the variance of their input, norms that are not the identity, logits of a spread of 3."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            if param.ndim == 1:
                param.copy_(param + 0.2 * noise)
            else:
                param.copy_(noise * param.shape[-1] ** -0.5)
        final_norm = model.model.norm.weight
        final_norm.copy_(final_norm * 3.0 + (2.0 if "Gemma3" in type(model).__name__ else 0.0))
        for param in model.parameters():
            param.copy_(param.to(torch.bfloat16).to(torch.float32))


def save_tiny(name: str, config: transformers.PreTrainedConfig, folder: Path) -> None:
    """A tiny model's config.json and model.safetensors (bfloat16)."""
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, seed=len(name))
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    file = folder / "model.safetensors"
    tensors = {key: value.to(torch.bfloat16).contiguous() for key, value in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    config_file = folder / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()), indent=2) + "\n")


def load_float32(folder: Path) -> torch.nn.Module:
    """The folder's model as transformers runs it in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def logits_of(model: torch.nn.Module, token_ids: np.ndarray) -> np.ndarray:  # float32[len(token_ids), vocab]
    """Logits of one full forward pass, without a cache."""
    with torch.no_grad():
        out = model(torch.from_numpy(token_ids.astype(np.int64))[None], use_cache=False)
    return out.logits[0].float().numpy()


def greedy(model: torch.nn.Module, prompt: np.ndarray, eos: int | None) -> tuple[np.ndarray, float]:
    """The greedy continuation, ended behind `eos` if it comes, and the least gap of the two best logits."""
    token_ids, least_gap = prompt, float("inf")
    for _ in range(NUM_GREEDY_TOKENS):
        logits = logits_of(model, token_ids)[-1]
        second, best = np.sort(logits)[-2:]
        least_gap = min(least_gap, float(best - second))
        token_ids = np.append(token_ids, np.int32(logits.argmax()))
        if token_ids[-1] == eos:
            break
    return token_ids[len(prompt) :].astype(np.int32), least_gap


def random_prompts(vocab_size: int, seed: int) -> list[np.ndarray]:
    """Prompts of PROMPT_TOKENS tokens; the first four share a prefix."""
    random = np.random.default_rng(seed)
    prefix = random.integers(0, vocab_size, SHARED_PREFIX_TOKENS)
    prompts = []
    for number, length in enumerate(PROMPT_TOKENS):
        tokens = random.integers(0, vocab_size, length)
        if number < 4:
            tokens[:SHARED_PREFIX_TOKENS] = prefix
        prompts.append(tokens.astype(np.int32))
    return prompts


def save_goldens(file: Path, model: torch.nn.Module, prompts: list[np.ndarray], stride: int, eos: int | None) -> float:
    """Writes prompts, logits at every `stride`-th position counted from the last, and continuations; the least gap."""
    arrays: dict[str, np.ndarray] = {}
    gaps = []
    for number, prompt in enumerate(prompts):
        positions = np.arange(len(prompt) - 1, -1, -stride, dtype=np.int32)[::-1]
        continuation, gap = greedy(model, prompt, eos)
        gaps.append(gap)
        arrays |= {
            f"prompt_{number}": prompt,
            f"positions_{number}": positions,
            f"logits_{number}": logits_of(model, prompt)[positions],
            f"greedy_{number}": continuation,
        }
    arrays["least_gap"] = np.asarray(gaps, np.float32)
    np.savez(file, **arrays)
    return min(gaps)


def make_tiny(name: str, config: transformers.PreTrainedConfig) -> None:
    """A tiny model and its goldens; seeds are tried until every gap is wide enough."""
    folder = GOLDENS / name
    folder.mkdir(parents=True, exist_ok=True)
    save_tiny(name, config, folder)
    model = load_float32(folder)
    for seed in range(100):
        gap = save_goldens(folder / "goldens.npz", model, random_prompts(config.vocab_size, seed), 4, None)
        if gap > MIN_GAP:
            print(f"{name}: prompts of seed {seed}, least gap {gap:.4f}")
            return
    raise RuntimeError(f"{name}: expected prompts with gaps over {MIN_GAP} within 100 seeds, found none")


def make_demo() -> None:
    """Goldens of the demo model: every third of those of its conversations whose gaps are wide enough."""
    from kvjax.demo import demo_model_path, demo_requests

    folder = demo_model_path()
    model = load_float32(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    eos = json.loads((folder / "config.json").read_text())["eos_token_id"]
    chosen = []
    for request in demo_requests():
        prompt = np.asarray(tokenizer(request.prompt)["input_ids"], np.int32)
        gap = greedy(model, prompt, eos)[1]
        if gap > MIN_GAP:
            chosen.append(prompt)
        print(f"demo {request.name}: {len(prompt)} tokens, least gap {gap:.4f}")
    target = GOLDENS / "demo"
    target.mkdir(parents=True, exist_ok=True)
    save_goldens(target / "goldens.npz", model, chosen[::3], 32, eos)


def main() -> None:
    names = ["llama", "qwen3", "gemma3", "demo"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"out of {', '.join(names)} (default: all)")
    chosen = parser.parse_args().models or names
    torch.set_num_threads(1)
    configs = tiny_configs()
    for name in chosen:
        if name == "demo":
            make_demo()
        else:
            make_tiny(name, configs[name])


if __name__ == "__main__":
    main()

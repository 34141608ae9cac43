"""Makes the committed goldens of the model tests: tiny random models and what Hugging Face transformers computes.

Flow:    scripts/goldens/families_*.py -> tiny folders; the demo model -> [make_goldens] -> tests/models/goldens/*

    pip install 'kvjax[oracle]' && python scripts/make_goldens.py [llama mixtral ... demo]

Weights are rounded to bfloat16, so the files are half as large and float32 still loads them exactly. Prompts are kept
only if the two best logits differ by more than 1e-3 at every greedy step, and the last chosen and the first refused
score of every top-k by more than 1e-4 at every token, so that any correct float32 implementation picks the same experts
and the same tokens; and if transformers with its cache is within 4e-5 of itself without.
tests/models/golden_models.py reads what this writes.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.goldens import (
    families_deepseek_v4,
    families_dense,
    families_experts,
    families_indexed,
    families_inputs,
    families_parts,
    families_recurrent,
    families_sharing,
    families_states,
)
from scripts.goldens.family import SHARED_PREFIX_TOKENS, Arrays, Family
from scripts.goldens.oracle import MAX_NOISE, NUM_GREEDY_TOKENS, Golden, Oracle
from scripts.goldens.weights import load_float32, save_tiny

GOLDENS = Path(__file__).resolve().parents[1] / "tests" / "models" / "goldens"
MODULES = (
    families_dense,
    families_experts,
    families_sharing,
    families_recurrent,
    families_states,
    families_deepseek_v4,
    families_inputs,
    families_parts,
    families_indexed,
)
MAX_SEEDS = 300
PREFIX_PROMPT = 3  # the prompt that is the shared prefix and nothing else
DEMO = "demo"


def all_families() -> dict[str, Family]:
    """Every tiny model by its name."""
    families: dict[str, Family] = {}
    for module in MODULES:
        families |= module.families()
    return families


def candidate(family: Family, number: int, seed: int, prefix: np.ndarray | None) -> np.ndarray:  # int32[num_tokens]
    """Prompt `number` of a seed; the first four begin with `prefix`, the last of them is nothing else."""
    random = np.random.default_rng(seed)
    first = random.integers(0, family.config.get_text_config().vocab_size, SHARED_PREFIX_TOKENS)
    for length in family.prompt_lengths[: number + 1]:
        tokens = random.integers(0, family.config.get_text_config().vocab_size, length)
    if number < 4:
        tokens[:SHARED_PREFIX_TOKENS] = first if prefix is None else prefix
    return family.inputs.mark(tokens.astype(np.int32), number)


def robust_golden(oracle: Oracle, number: int, prefix: np.ndarray | None) -> Golden:
    """The golden of the first seed whose choices rounding cannot change, in float32 that agrees with itself."""
    for seed in range(MAX_SEEDS):
        golden = oracle.golden(candidate(oracle.family, number, seed, prefix), number)
        if golden.is_robust and oracle.noise(golden) < MAX_NOISE:
            return golden
    raise RuntimeError(f"expected prompt {number} to be robust for one of {MAX_SEEDS} seeds, found none")


def save_goldens(folder: Path, goldens: list[Golden], constants: Arrays) -> None:
    """goldens.npz: `name_i` for prompt i; gaps are arrays over prompts."""
    arrays = dict(constants)
    for number, golden in enumerate(goldens):
        for name in ("prompt", "positions", "logits", "greedy", "decode_logits"):
            arrays[f"{name}_{number}"] = getattr(golden, name)
        arrays |= {f"{name}_{number}": value for name, value in golden.extras.items()}
    for gap in ("least_gap", "choice_gap"):
        arrays[gap] = np.asarray([getattr(golden, gap) for golden in goldens], np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / "goldens.npz", **arrays)


def report(name: str, oracle: Oracle, goldens: list[Golden]) -> None:
    """Prints what was made."""
    print(
        f"{name}: {type(oracle.model).__name__}, {sum(p.numel() for p in oracle.model.parameters())} parameters, "
        f"{sum(file.stat().st_size for file in (GOLDENS / name).iterdir()) / 1e3:.0f} kB, "
        f"least gap {min(golden.least_gap for golden in goldens):.4f}, "
        f"choice gap {min(golden.choice_gap for golden in goldens):.5f}, "
        f"noise {max(map(oracle.noise, goldens)):.1e}, "
        f"distinct tokens {min(len(set(golden.greedy.tolist())) for golden in goldens)} of {NUM_GREEDY_TOKENS}",
        flush=True,
    )


def make_tiny(name: str, family: Family) -> None:
    """A tiny model and its goldens."""
    folder = GOLDENS / name
    folder.mkdir(parents=True, exist_ok=True)
    save_tiny(name, family, folder)
    oracle = Oracle(family, load_float32(folder, family))
    prefix = robust_golden(oracle, PREFIX_PROMPT, None).prompt
    goldens = [robust_golden(oracle, number, prefix) for number in range(len(family.prompt_lengths))]
    save_goldens(folder, goldens, family.constants)
    report(name, oracle, goldens)


def make_demo() -> None:
    """Goldens of the demo model: every third of those of its conversations whose gaps are wide enough."""
    from kvjax.demo import demo_model_path, demo_requests

    folder = demo_model_path()
    family = Family(config=transformers.AutoConfig.from_pretrained(folder), logits_stride=32)
    oracle = Oracle(family, load_float32(folder, family))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    eos = json.loads((folder / "config.json").read_text())["eos_token_id"]
    prompts = [np.asarray(tokenizer(request.prompt)["input_ids"], np.int32) for request in demo_requests()]
    goldens = [golden for golden in (oracle.golden(prompt, 0, eos) for prompt in prompts) if golden.is_robust][::3]
    small = [replace(golden, decode_logits=golden.decode_logits[:0]) for golden in goldens]  # its vocabulary is large
    save_goldens(GOLDENS / DEMO, small, {})
    report(DEMO, oracle, goldens)


def main() -> None:
    families = all_families()
    names = [*families, DEMO]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"out of {', '.join(names)} (default: all)")
    chosen = parser.parse_args().models or names
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, numpy {np.__version__}")
    for name in chosen:
        if name == DEMO:
            make_demo()
        else:
            make_tiny(name, families[name])


if __name__ == "__main__":
    main()

"""Makes tests/models/quantised/goldens/*: tiny quantised checkpoints, and what transformers computes with each.

Flow:    scripts/goldens/quantised_cases.py -> [make_quantised_goldens] -> tests/models/quantised/goldens/*

    pip install 'kvjax[oracle]' && python scripts/make_quantised_goldens.py [fp8_block ...]

transformers dequantises the weights itself and runs the model in float32; the case gptq needs auto-round 0.16 beside it
(`pip install auto-round`), whose layers do that. goldens.npz has of one prompt what the
goldens of tests/models/golden_models.py have; the two best logits differ by more than 1e-3 at every greedy step.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.goldens.oracle import MAX_NOISE, Golden, Oracle
from scripts.goldens.quantised_cases import Case, cases
from scripts.goldens.weights import save_tiny

GOLDENS = Path(__file__).resolve().parents[1] / "tests" / "models" / "quantised" / "goldens"
MAX_SEEDS = 100


def robust_golden(oracle: Oracle) -> Golden:
    """The golden of the first seed whose choices rounding cannot change."""
    vocab_size = oracle.family.config.get_text_config().vocab_size
    for seed in range(MAX_SEEDS):
        prompt = np.random.default_rng(seed).integers(0, vocab_size, oracle.family.prompt_lengths[0])
        golden = oracle.golden(prompt.astype(np.int32), 0)
        if golden.is_robust and oracle.noise(golden) < MAX_NOISE:
            return golden
    raise RuntimeError(f"expected one of {MAX_SEEDS} prompts to be robust, found none")


def save_checkpoint(name: str, case: Case, folder: Path) -> None:
    """config.json and model.safetensors."""
    with tempfile.TemporaryDirectory() as plain:
        save_tiny(name, case.family, Path(plain))
        tensors = load_file(Path(plain) / "model.safetensors")
        config = json.loads((Path(plain) / "config.json").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "model.safetensors"
    save_file(case.stored(tensors), file, metadata={"format": "pt"})
    file.chmod(0o644)
    config |= {"quantization_config": case.quantization}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def make(name: str, case: Case) -> None:
    """One folder."""
    folder = GOLDENS / name
    save_checkpoint(name, case, folder)
    oracle = Oracle(case.family, case.load(folder))
    golden = robust_golden(oracle)
    arrays = {key: getattr(golden, key) for key in ("prompt", "positions", "logits", "greedy", "decode_logits")}
    np.savez_compressed(folder / "goldens.npz", **arrays)
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e3
    print(f"{name}: {size:.0f} kB, least gap {golden.least_gap:.4f}, noise {oracle.noise(golden):.1e}", flush=True)


def main() -> None:
    known = cases()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"out of {', '.join(known)} (default: all)")
    chosen = parser.parse_args().cases or known
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, numpy {np.__version__}")
    for name in chosen:
        make(name, known[name])


if __name__ == "__main__":
    main()

"""Measures the resident memory and the time that loading a quantised checkpoint of a few gigabytes takes.

Flow:    seeded random finite numbers -> a Llama of fp8 in blocks of 128 x 128, in a folder -> load_model -> VmHWM

    python scripts/measure_quantised_load.py [--gigabytes 4] [--folder DIR] [--keep]

Layers have the sizes of Llama 3 8B, 18 of them in 4 GB. The model is loaded in a process of its own, whose highest
resident memory the kernel keeps; Linux only. The folder is removed afterwards.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

HIDDEN, INNER, KV, VOCAB = 4096, 14336, 1024, 16384
BLOCK = 128
PROJECTIONS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
LAYER_BYTES = sum(rows * columns for rows, columns in PROJECTIONS.values())
PROGRAM = """
import sys, time
import jax
from flax import nnx
from kvjax.models import load_model
start = time.perf_counter()
model = load_model(sys.argv[1], keep_quantised=sys.argv[2] == "keep")
seconds = time.perf_counter() - start
held = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model.module)))
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(held, int(peak) * 1024, seconds)
"""


def finite(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:  # float8_e4m3fn
    """Random bytes that are no NaN."""
    values = random.integers(0, 256, shape, np.uint8)
    values[(values & 0x7F) == 0x7F] ^= 1
    return values.view(jnp.float8_e4m3fn)


def config(num_layers: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": num_layers,
        "vocab_size": VOCAB,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    }


def write(folder: Path, num_layers: int) -> None:
    """The checkpoint, two layers a file."""
    random, weight_map = np.random.default_rng(0), {}
    ones = np.ones(HIDDEN, jnp.bfloat16)
    for first in range(0, num_layers, 2):
        tensors: dict[str, np.ndarray] = {}
        if first == 0:
            tensors["model.embed_tokens.weight"] = random.normal(0, 0.02, (VOCAB, HIDDEN)).astype(jnp.bfloat16)
            tensors["model.norm.weight"] = ones
        for layer in range(first, min(first + 2, num_layers)):
            for name, (rows, columns) in PROJECTIONS.items():
                weight = f"model.layers.{layer}.{name}.weight"
                tensors[weight] = finite(random, (rows, columns))
                scale = random.uniform(1e-5, 1e-4, (rows // BLOCK, columns // BLOCK))
                tensors[f"{weight}_scale_inv"] = scale.astype(np.float32)
            for name in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"model.layers.{layer}.{name}.weight"] = ones
        file = f"model-{first:05}.safetensors"
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config(num_layers)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of the checkpoint (default: 4)")
    parser.add_argument("--folder", type=Path, help="where to put it for a while (default: the system's)")
    parser.add_argument("--keep", action="store_true", help="load with keep_quantised")
    args = parser.parse_args()
    num_layers = max(1, round((args.gigabytes * 1e9 - 2 * VOCAB * HIDDEN) / LAYER_BYTES))
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        write(Path(folder), num_layers)
        stored = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        command = [sys.executable, "-c", PROGRAM, folder, "keep" if args.keep else ""]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    held, peak, seconds = (float(word) for word in done.stdout.split())
    print(
        f"{stored / 1e9:.2f} GB of files, {held / 1e9:.2f} GB of weights, {peak / 1e9:.2f} GB resident at most, "
        f"{seconds:.0f} s"
    )


if __name__ == "__main__":
    main()

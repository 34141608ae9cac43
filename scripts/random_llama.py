"""Writes a Llama of random weights, from a seed, for measurements that no checkpoint is at hand for.

    python scripts/random_llama.py FOLDER --size 20m         then: taskset -c 1 kvjax bench --model FOLDER
    python scripts/random_llama.py FOLDER --layers 32        then: kvjax bench --model FOLDER --no-compilation-cache

Flow:    a size -> [random_llama] -> config.json, model.safetensors (float32)
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def shape(vocab_size: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, int]:
    """The sizes under their names in config.json."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


SIZES = {
    "tiny": shape(256, 64, 128, 4, 4, 2),  # compiles fast: for compile time by the number of layers
    "20m": shape(32_000, 288, 768, 11, 6, 6),  # Llama 2's vocabulary, the width of the stories15M checkpoint
    "20m-wide": shape(8_192, 512, 1_376, 5, 8, 4),  # few wide layers
}


def write_llama(folder: Path, config: dict[str, Any]) -> None:
    """Makes the folder of a checkpoint.

    Raises:
        FileExistsError: there is a model in it.
    """
    from flax import nnx

    from kvjax.models import ModelConfig, build_model
    from kvjax.models.save import save_weights

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "config.json").open("x") as file:
        json.dump(config, file, indent=1)
    save_weights(build_model(ModelConfig.from_folder(folder), dtype="float32", rngs=nnx.Rngs(0)), folder, "float32")


def main(arguments: list[str] | None = None) -> int:
    """Writes the model; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="(default %(default)s)")
    parser.add_argument("--layers", type=int, help="instead of the size's own")
    options = parser.parse_args(arguments)
    layers = {} if options.layers is None else {"num_hidden_layers": options.layers}
    write_llama(options.folder, COMMON | SIZES[options.size] | layers)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

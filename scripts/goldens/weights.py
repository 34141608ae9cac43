"""Random weights of a tiny model and its Hugging Face folder.

Flow:    Family -> [save_tiny] -> config.json, model.safetensors (bfloat16) -> [load_float32] -> oracle.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from scripts.goldens.family import Family


def fan_in(name: str, param: torch.Tensor, family: Family) -> int:
    """Inputs of a weight."""
    if "conv" in name:
        return param[0].numel()
    return param.shape[-2 if name.endswith(family.transposed) else -1]


def randomise(model: torch.nn.Module, family: Family, seed: int) -> None:
    """Weights that keep the variance of their input, norms that are not the identity, logits of a spread of 3."""
    generator = torch.Generator().manual_seed(seed)
    saved = model.state_dict()
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            if param.ndim == 1:
                param.copy_(param + 0.2 * noise)
            else:
                param.copy_(noise * fan_in(name, param, family) ** -0.5)
        for name, buffer in model.named_buffers():
            if name in saved and buffer.is_floating_point():
                buffer.copy_(buffer + 0.2 * torch.randn(buffer.shape, generator=generator))
        final_norm = model.get_submodule(family.final_norm).weight
        offset = 1.0 if final_norm.mean().abs() < 0.5 else 0.0  # a norm that multiplies by 1 + weight
        signs = torch.ones(final_norm.shape)
        if family.flips_final_norm:
            signs = torch.randint(2, final_norm.shape, generator=generator) * 2.0 - 1.0
        final_norm.copy_(signs * (final_norm * 3.0 + 3.0 * offset) - offset)
        family.settle(model)
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(tensor.to(torch.bfloat16).to(torch.float32))


def hub_name(name: str, family: Family) -> str:
    """The name of a weight in the Hub's checkpoints, which transformers reads but does not quite write."""
    for pattern, replacement in family.renamed:
        name = re.sub(pattern, replacement, name)
    return name


def save_tiny(name: str, family: Family, folder: Path) -> None:
    """A tiny model's config.json and model.safetensors (bfloat16)."""
    torch.manual_seed(len(name))  # of what transformers itself draws
    model = family.model_class.from_config(family.config, dtype=torch.float32)
    randomise(model, family, seed=len(name))
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    file = folder / "model.safetensors"
    tensors = {
        hub_name(key, family): (value.to(torch.bfloat16) if value.is_floating_point() else value).contiguous()
        for key, value in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)
    config_file = folder / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()), indent=2) + "\n")
    check_round_trip(model, load_float32(folder, family))


def load_float32(folder: Path, family: Family) -> torch.nn.Module:
    """The folder's model as transformers runs it in float32."""
    return family.model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def check_round_trip(made: torch.nn.Module, loaded: torch.nn.Module) -> None:
    """Raises unless the folder's weights are those that were drawn."""
    expected, found = made.state_dict(), loaded.state_dict()
    differing = [key for key in expected if key not in found or not torch.equal(expected[key], found[key])]
    if differing or len(expected) != len(found):
        raise RuntimeError(f"expected the loaded weights to be those saved, got others in {', '.join(differing)}")

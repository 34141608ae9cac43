"""Makes tests/models/settings/*.npz: what each value of each setting does to transformers' logits, by architecture.

Flow:    scripts/goldens/setting_cases.py -> [make_setting_goldens] -> tests/models/settings/*.npz

    pip install 'kvjax[oracle]' && python scripts/make_setting_goldens.py [LlamaForCausalLM ...]

A file has `cases`, JSON: the base first (its key is ""), then every form:

    key, change   as `Form` has them
    effect        the largest difference from the base's logits, over one text; null where transformers refuses the form
                  or cannot run it
    seed          of the prompt, if the logits are kept: they are where the form computes otherwise, or reads otherwise
    tensors       name and shape of each tensor of the checkpoint, if those differ from the base's

and `logits_i`, float32[NUM_STEPS, vocab], of a greedy continuation of case i. The two best logits differ by more than
1e-3 at every step, and chosen and refused scores of every top-k by more than 1e-4, but for those that are equal: of
them the first ones are chosen. Float64 gives the logits within 2e-5.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvjax.models.config import ModelConfig
from scripts.goldens.setting_cases import (
    ARCHITECTURES,
    Form,
    base_config,
    drawn,
    drawn_features,
    drawn_tokens,
    forms,
    same_model,
    with_change,
)
from scripts.goldens.small_configs import Data

OUT = Path(__file__).resolve().parents[1] / "tests" / "models" / "settings"
NUM_STEPS = 4
MIN_GAP, MIN_CHOICE_GAP, MAX_NOISE = 1e-3, 1e-4, 2e-5
NO_EFFECT = 1e-6
MAX_SEEDS = 60

Shapes = dict[str, tuple[int, ...]]


class Choices:
    """Top-k that prefers the first of equal scores, and the least gap between scores that are not."""

    least_gap = float("inf")

    def topk(self, scores: torch.Tensor, k: int, dim: int = -1, **_: Any) -> Any:
        ordered = scores.sort(dim=dim, descending=True, stable=True)
        values, indices = (part.narrow(dim, 0, k) for part in ordered)
        if k < scores.shape[dim]:
            chosen, refused = ordered.values.select(dim, k - 1), ordered.values.select(dim, k)
            gaps = (chosen - refused)[torch.isfinite(chosen) & (chosen != refused)]
            self.least_gap = min(self.least_gap, float(gaps.min())) if gaps.numel() else self.least_gap
        return torch.return_types.topk((values, indices))


@contextmanager
def stable_choices() -> Iterator[Choices]:
    """Every top-k inside is stable."""
    choices, function, method = Choices(), torch.topk, torch.Tensor.topk
    torch.topk = choices.topk  # type: ignore[assignment]
    torch.Tensor.topk = lambda *args, **kwargs: choices.topk(*args, **kwargs)  # type: ignore[method-assign]
    try:
        yield choices
    finally:
        torch.topk, torch.Tensor.topk = function, method  # type: ignore[method-assign]


@dataclass
class Model:
    """One model of transformers with drawn weights."""

    module: torch.nn.Module
    shapes: Shapes

    @property
    def dtype(self) -> str:
        """Of its weights."""
        return str(next(self.module.parameters()).dtype).removeprefix("torch.")

    def logits(self, token_ids: np.ndarray) -> tuple[np.ndarray, float]:
        """float32[len(token_ids), vocab] of a pass without a cache, and the least gap of its choices."""
        tokens = torch.from_numpy(token_ids.astype(np.int64))[None]
        arguments: dict[str, Any] = {"input_ids": tokens}
        config = self.module.config
        if config.model_type == "whisper":
            features = drawn_features(config.num_mel_bins, 2 * config.max_source_positions).astype(self.dtype)
            arguments = {"decoder_input_ids": tokens, "input_features": torch.from_numpy(features)[None]}
        with torch.no_grad(), stable_choices() as choices:
            out = self.module(**arguments, use_cache=False, return_dict=True)
        return out.logits[0].float().numpy(), choices.least_gap

    def continued(self, seed: int) -> tuple[np.ndarray, bool]:
        """Logits float32[NUM_STEPS, vocab] of the greedy continuation of a prompt, and whether it is robust."""
        token_ids = drawn_tokens(seed)
        kept, gap, choice_gap = [], float("inf"), float("inf")
        for _ in range(NUM_STEPS):
            logits, choices = self.logits(token_ids)
            kept.append(logits[-1])
            second, best = np.sort(logits[-1])[-2:]
            gap, choice_gap = min(gap, float(best - second)), min(choice_gap, choices)
            token_ids = np.append(token_ids, np.int32(logits[-1].argmax()))
        is_robust = gap > MIN_GAP and choice_gap > MIN_CHOICE_GAP
        return np.stack(kept), is_robust and self.noise(token_ids[:-1], kept) < MAX_NOISE

    def noise(self, token_ids: np.ndarray, kept: list[np.ndarray]) -> float:
        """How far float32 is from float64."""
        self.module.double()
        logits, _ = self.logits(token_ids)
        self.module.float()
        return float(np.abs(logits[-len(kept) :] - np.stack(kept)).max())


def made(data: Data) -> Model:
    """The model of a config.json, its weights drawn."""
    architecture = getattr(transformers, data["architectures"][0])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(data))
        config = architecture.config_class.from_pretrained(folder)
        architecture(config).save_pretrained(folder)
        file = Path(folder) / "model.safetensors"
        shapes = {name: tuple(tensor.shape) for name, tensor in load_file(file).items()}
        tensors = {name: torch.from_numpy(drawn(name, shape)) for name, shape in shapes.items()}
        save_file(tensors, file, metadata={"format": "pt"})
        (Path(folder) / "config.json").write_text(json.dumps(data))
        options = {"attn_implementation": "eager", "experts_implementation": "eager"}
        module = architecture.from_pretrained(folder, dtype=torch.float32, **options).eval()
    return Model(module, shapes)


def normalised(data: Data) -> Data:
    """The language model's settings as transformers writes them."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(data))
        config = getattr(transformers, data["architectures"][0]).config_class.from_pretrained(folder)
    written: Data = json.loads(config.to_json_string(use_diff=False))
    return written.get("text_config", written)


def effect_of(model: Model, expected: np.ndarray) -> float:
    """How far the logits of the first prompt are from `expected`."""
    logits = model.logits(drawn_tokens(0))[0]
    if logits.shape != expected.shape:
        return float("inf")
    return float(np.nan_to_num(np.abs(logits - expected), nan=1e9).max())


def reads_otherwise(architecture: str, form: Form) -> bool:
    """Whether kvjax makes another model of the form than of the base."""
    try:
        return not same_model(ModelConfig.from_dict(with_change(architecture, form.change)), base_of(architecture))
    except Exception:
        return False


def base_of(architecture: str) -> ModelConfig:
    """What kvjax makes of the base."""
    return ModelConfig.from_dict(base_config(architecture))


def kept(model: Model) -> tuple[int, np.ndarray]:
    """(seed, logits) of the first robust prompt."""
    for seed in range(MAX_SEEDS):
        logits, is_robust = model.continued(seed)
        if is_robust:
            return seed, logits
    raise RuntimeError(f"expected one of {MAX_SEEDS} prompts to be robust, found none")


def make(architecture: str) -> None:
    """One file."""
    base = made(base_config(architecture))
    expected = base.logits(drawn_tokens(0))[0]
    seed, logits = kept(base)
    cases: list[Data] = [{"key": "", "change": {}, "effect": 0.0, "seed": seed, "tensors": base.shapes}]
    arrays = {"logits_0": logits}
    for form in forms(architecture, normalised(base_config(architecture))):
        case: Data = {"key": form.key, "change": form.change, "effect": None}
        try:
            model = made(with_change(architecture, form.change))
            case["effect"] = effect_of(model, expected)
            if case["effect"] > NO_EFFECT or reads_otherwise(architecture, form):
                case |= {} if model.shapes == base.shapes else {"tensors": model.shapes}
                case["seed"], arrays[f"logits_{len(cases)}"] = kept(model)
        except Exception as error:
            case["why"] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        print(
            f"{architecture} {form.key} {json.dumps(form.change)[:90]}: {case['effect']} {case.get('why', '')}",
            flush=True,
        )
        cases.append(case)
    text = json.dumps(cases, separators=(",", ":")).replace("Infinity", "1e999")
    OUT.mkdir(exist_ok=True)
    np.savez_compressed(OUT / f"{architecture}.npz", cases=np.frombuffer(text.encode(), np.uint8), **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE", help=f"out of {', '.join(ARCHITECTURES)}")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(100)
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    for architecture in parser.parse_args().architectures or ARCHITECTURES:
        make(architecture)


if __name__ == "__main__":
    main()

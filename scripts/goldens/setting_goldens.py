"""Values of settings that were tried: what transformers computes with each, and how it is accounted for here. No torch.

Flow:    tests/models/settings/*.npz -> [cases_of] -> Case.account -> tests/models/config_files, list_settings.py

Accounts:

    none       transformers computes the same, and so is the config that is read here
    case       transformers' logits are kept, and the model here gives them
    refused    reading it raises ConfigError, which names the key
    chosen     kvjax reads a key that transformers does not, on purpose (`CHOSEN`)
    not run    transformers refuses it, or cannot run it
    missing    none of these: a difference in silence, or a gap of the goldens
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from kvjax.errors import ConfigError
from kvjax.models import ModelConfig
from scripts.goldens.setting_cases import base_config, drawn, drawn_tokens, same_model, with_change

SETTINGS = Path(__file__).resolve().parents[2] / "tests" / "models" / "settings"
ACCOUNTS = ("case", "none", "refused", "chosen", "not run", "missing")
UNTOUCHED = frozenset(["architectures", "model_type", "transformers_version"])  # have one value only
CHOSEN = frozenset(
    [("NemotronHForCausalLM", "mamba_ssm_cache_dtype")]  # the dtype that states are kept in, as vLLM keeps them
)
ARCHITECTURES = tuple(sorted(file.stem for file in SETTINGS.glob("*.npz")))


@dataclass(frozen=True)
class Case:
    """One value of a key of an architecture's config.json."""

    architecture: str
    number: int  # in its file; 0: the base
    key: str  # "" of the base
    change: dict[str, Any]  # the value, with what it needs beside it
    effect: float | None  # on transformers' logits; None: transformers does not run it
    seed: int | None  # of the prompt; None: no logits
    logits: np.ndarray | None  # float32[num_steps, vocab] of a greedy continuation
    tensors: dict[str, list[int]]  # shapes by name
    why: str  # transformers does not run it

    @property
    def id(self) -> str:
        """Architecture, key and number."""
        return f"{self.architecture.partition('For')[0]}-{self.key or 'base'}-{self.number}"

    @property
    def data(self) -> dict[str, Any]:
        """The config.json."""
        return with_change(self.architecture, self.change)

    @property
    def prompt(self) -> np.ndarray:  # int32[num_tokens]
        """What the logits follow."""
        assert self.seed is not None
        return drawn_tokens(self.seed)

    @functools.cached_property
    def config(self) -> ModelConfig | str:
        """As it is read here, or why it is refused."""
        try:
            return ModelConfig.from_dict(self.data)
        except ConfigError as error:
            return str(error)

    @property
    def account(self) -> str:
        """One of those above."""
        if isinstance(self.config, str):
            is_named = any(name in self.config for name in (self.key, *self.change))
            return "refused" if is_named else "not run" if self.effect is None else "missing"
        if self.effect is None:
            return "not run"
        if (self.architecture, self.key) in CHOSEN:
            return "chosen"
        if self.logits is not None:
            return "case"
        is_same = same_model(self.config, ModelConfig.from_dict(base_config(self.architecture)))
        return "none" if is_same and self.effect < 1e-6 else "missing"

    def save(self, folder: Path) -> None:
        """A Hugging Face folder of the model."""
        tensors = {name: drawn(name, tuple(shape)) for name, shape in self.tensors.items()}
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self.data), encoding="utf-8")


@functools.cache
def cases_of(architecture: str) -> tuple[Case, ...]:
    """The base and every form of an architecture."""
    with np.load(SETTINGS / f"{architecture}.npz") as file:
        raw = json.loads(bytes(file["cases"]))
        arrays = {name: file[name] for name in file.files}
    return tuple(
        Case(
            architecture=architecture,
            number=number,
            key=case["key"],
            change=case["change"],
            effect=case["effect"],
            seed=case.get("seed"),
            logits=arrays.get(f"logits_{number}"),
            tensors=case.get("tensors", raw[0]["tensors"]),
            why=case.get("why", ""),
        )
        for number, case in enumerate(raw)
    )

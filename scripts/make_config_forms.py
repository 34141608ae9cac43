"""Makes tests/models/config_forms.json: what transformers makes of many forms of config.json of every architecture.

Flow:    scripts/goldens/config_forms.py -> [make_config_forms] -> tests/models/config_forms.json

    pip install 'kvjax[oracle]' && python scripts/make_config_forms.py [ARCHITECTURE ...]

By architecture:

    normal       its small config as transformers writes it, with every key
    differences  for each of `forms`, in order, the change that makes of `normal` what transformers writes; null where
                 transformers refuses it
    tied         for each of `tied_forms` whether transformers ties the output head; null where it refuses it
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.goldens.config_forms import REMOVED, Change, forms, text_of, tied_forms
from scripts.goldens.small_configs import ARCHITECTURES, AROUND, Data, small_config

OUT = Path(__file__).resolve().parents[1] / "tests" / "models" / "config_forms.json"


def read_config(data: Data) -> transformers.PreTrainedConfig:
    """As transformers reads it of a folder."""
    config_class = getattr(transformers, data["architectures"][0]).config_class
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(data))
        return config_class.from_pretrained(folder)


def normalised(data: Data) -> Data | None:
    """As transformers reads and writes it, other modalities apart; None: it refuses it."""
    try:
        written: Data = json.loads(read_config(data).to_json_string(use_diff=False))
    except Exception:
        return None
    kept = {key: value for key, value in written.items() if key not in ("vision_config", "audio_config")}
    return {**kept, "architectures": data["architectures"]}


def difference(data: Data, other: Data | None) -> Change | None:
    """The change that makes `other` of `data`."""
    if other is None:
        return None
    changes = []
    for before, after in ((data, other), (text_of(data), text_of(other))):
        change = {key: value for key, value in after.items() if key not in before or before[key] != value}
        change |= {key: REMOVED for key in before if key not in after}
        changes.append({key: value for key, value in change.items() if key != "text_config"})
    return changes if "text_config" in data else [{}, changes[1]]


def is_tied(data: Data) -> bool | None:
    """Whether the output head is the embeddings; None: transformers refuses the config. Towers are left out."""
    make = transformers.AutoModel.from_config

    def make_text(config: Any, *arguments: Any) -> torch.nn.Module:
        is_text = "text" in config.model_type or config.model_type == "mistral"
        return make(config, *arguments) if is_text else torch.nn.Identity()

    try:
        config = read_config(data)
    except Exception:
        return None
    with torch.device("meta"), mock.patch.object(transformers.AutoModel, "from_config", make_text):
        model = getattr(transformers, data["architectures"][0])(config)
    model.tie_weights()
    return bool(model.get_output_embeddings().weight is model.get_input_embeddings().weight)


def entry_of(architecture: str) -> Data:
    """What is written of an architecture."""
    raw = small_config(architecture)
    normal = normalised(raw)
    if normal is None:
        raise RuntimeError(f"expected a config that transformers reads, got {raw}")
    entry: Data = {"normal": normal}
    entry["differences"] = [difference(normal, normalised(form)) for form in forms(raw, normal)]
    if architecture in AROUND:
        entry["tied"] = [is_tied(form) for form in tied_forms(raw)]
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE", help="others stay as they are")
    chosen = parser.parse_args().architectures or ARCHITECTURES
    transformers.logging.set_verbosity(100)
    warnings.simplefilter("ignore")
    known = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {}
    made = {architecture: entry_of(architecture) for architecture in chosen}
    found = {name: entry for name in ARCHITECTURES if (entry := made.get(name) or known.get(name)) is not None}
    lines = (
        f"{json.dumps(name)}: {json.dumps(entry, sort_keys=True, separators=(',', ':'))}"
        for name, entry in found.items()
    )
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    for name, entry in made.items():
        refused = entry["differences"].count(None)
        print(f"{name}: {len(entry['differences'])} forms, {refused} refused, {entry.get('tied', [])}")


if __name__ == "__main__":
    main()

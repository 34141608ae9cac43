"""The script that writes a Llama of random weights: what it writes loads, and it overwrites nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvjax.models import load_model
from scripts.random_llama import main


def test_a_model_of_as_many_layers_as_asked_for_loads(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    assert main([str(folder), "--layers", "1"]) == 0
    model = load_model(folder)
    assert (model.config.num_layers, model.config.vocab_size, model.config.dtype) == (1, 256, "float32")
    with pytest.raises(FileExistsError):
        main([str(folder)])

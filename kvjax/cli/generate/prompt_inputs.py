"""What a prompt of a file is given with beside its tokens: an .npz of features, or of vectors and positions.

Flow:    .npz -> [read_inputs] -> arguments of LLMEngine.add_request

    encoder_features    as the model's encoder takes them
    embeds_0, start_0   [n, dim] vectors and the place of the first in the prompt; embeds_1, ... of further items
    prompt_positions    [3, num_prompt_tokens] of models with multimodal positions
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np


def read_inputs(file: Path) -> dict[str, Any]:
    """The arrays of `file` as `add_request` takes them.

    Raises:
        ValueError: it is no .npz, or holds other arrays than the above.
        OSError: it cannot be read.
    """
    from kvjax.engine import MultimodalInput

    arrays = _arrays(file)
    inputs: dict[str, Any] = {
        name: arrays.pop(name) for name in ("encoder_features", "prompt_positions") if name in arrays
    }
    items: list[MultimodalInput] = []
    while f"embeds_{len(items)}" in arrays:
        start = arrays.pop(f"start_{len(items)}", None)
        embeds = arrays.pop(f"embeds_{len(items)}")
        items.append(MultimodalInput(embeds=embeds, start=None if start is None else int(start)))
    if arrays:
        raise ValueError(
            f"{file}: expected encoder_features, prompt_positions, embeds_0, start_0, ..., "
            f"got {', '.join(sorted(arrays))}"
        )
    return {**inputs, "embeddings": items} if items else inputs


def _arrays(file: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(file, allow_pickle=False) as data:
            return dict(data)
    except (ValueError, zipfile.BadZipFile, TypeError) as error:
        raise ValueError(f"{file}: expected an .npz file of arrays, got {error}") from error

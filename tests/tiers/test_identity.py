"""What a folder of units is of: a folder of another layout, order, hash or weights is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvjax.core import BlockHasher
from kvjax.tiers.config import TierConfig
from kvjax.tiers.tiers import Tiers
from tests.transfer.worlds import config_of, specs

HASHER = BlockHasher(4)


def make_tiers(folder: Path, platform: str = "cpu", num_context: int = 1, weights: str = "w") -> Tiers:
    config = TierConfig(disk_folder=str(folder), disk_bytes=1 << 20, weights=weights)
    return Tiers.of_process(config, config_of(specs(8), platform), HASHER, num_context=num_context)


def test_a_folder_is_of_what_a_model_says_of_itself(tmp_path: Path) -> None:
    """What differs is told by its name."""
    config = TierConfig(disk_folder=str(tmp_path), disk_bytes=1 << 20)
    for factor, weights in ((2.0, "a"), (2.0, "a"), (4.0, "a"), (2.0, "b")):
        model = {"rope.factor": str(factor), "weights": weights}
        if (factor, weights) == (2.0, "a"):
            Tiers.of_process(config, config_of(specs(8), "cpu"), HASHER, model=model)
            continue
        told = "rope.factor '2.0' there, '4.0' here" if factor == 4.0 else "weights 'a' there, 'b' here"
        with pytest.raises(ValueError, match=f"is of another cache: {told}; give this one"):
            Tiers.of_process(config, config_of(specs(8), "cpu"), HASHER, model=model)


def test_a_folder_is_refused_by_what_differs(tmp_path: Path) -> None:
    make_tiers(tmp_path, num_context=2)
    make_tiers(tmp_path, num_context=2)
    for other, what in (
        ({"num_context": 1}, "tokens 'interleaved over 2 context ranks' there, 'in order' here"),
        (
            {"num_context": 4},
            "tokens 'interleaved over 2 context ranks' there, 'interleaved over 4 context ranks' here",
        ),
        ({"num_context": 2, "platform": "tpu"}, "layout .*; give this one a folder of its own"),
        ({"num_context": 2, "weights": "v"}, "weights 'w' there, 'v' here"),
    ):
        with pytest.raises(ValueError, match=what):
            make_tiers(tmp_path, **other)  # type: ignore[arg-type]

"""What the planner asks of recurrent layers: their tables, and a device's share of their states."""

from __future__ import annotations

import pytest

from kvjax.core import MambaSpec
from kvjax.planning import Parallelism, per_device, plan_kv_cache
from kvjax.planning.spec_rules import replicated, table_columns

STATE = MambaSpec(block_size=16, shapes=((64, 3), (8, 4, 4)), dtypes=("bfloat16", "float32"))


@pytest.mark.parametrize(
    ("mode", "drafts", "columns"), [("none", 0, 1), ("none", 2, 3), ("align", 0, 7), ("align", 2, 9)]
)
def test_columns_of_states(mode: str, drafts: int, columns: int) -> None:
    spec = MambaSpec(
        block_size=16,
        shapes=STATE.shapes,
        dtypes=STATE.dtypes,
        mamba_cache_mode=mode,
        num_speculative_blocks=drafts,
    )
    assert table_columns(spec, 100, 1) == columns


@pytest.mark.parametrize(
    ("devices", "local", "whole"), [(4, (16, 2), (64, 8)), (8, (8, 1), (64, 8)), (16, (8, 1), (128, 16))]
)
def test_a_device_has_its_part_of_a_state(devices: int, local: tuple, whole: tuple) -> None:
    shapes = [shape[0] for shape in per_device(STATE, devices).shapes]
    assert tuple(shapes) == local
    assert tuple(shape[0] for shape in replicated(STATE, devices).shapes) == whole


def test_recurrent_layers_do_not_split_their_tokens() -> None:
    with pytest.raises(NotImplementedError, match="mamba layers do not work with context parallelism, got 2 context"):
        plan_kv_cache({"a": STATE}, num_blocks=9, max_model_len=64, parallel=Parallelism(prefill_context=2))

"""Short blocks of states: every so many tokens, at multiples of all other blocks, and never longer than they were."""

from __future__ import annotations

import pytest

from kvjax.configs import load_model_config
from kvjax.core.kinds.mamba import MambaSpec
from kvjax.core.spec import KVCacheSpec
from kvjax.planning import with_state_blocks


def specs_of(block_size: int) -> dict[str, KVCacheSpec]:
    return load_model_config("qwen3-next-80b-a3b").kv_cache_specs(block_size)


@pytest.mark.parametrize(
    ("attention", "asked", "states"), [(16, 64, 64), (16, 50, 64), (16, 1, 16), (48, 64, 96), (16, 9_999, 544)]
)
def test_states_come_at_whole_blocks_of_the_others(attention: int, asked: int, states: int) -> None:
    found = with_state_blocks(specs_of(attention), asked)
    sizes = {type(spec).__name__: spec.block_size for spec in found.values()}
    assert sizes == {"MambaSpec": states, "FullAttentionSpec": attention}


def test_nothing_but_the_blocks_of_states_changes() -> None:
    before = specs_of(16)
    after = with_state_blocks(before, 64)
    assert list(after) == list(before)
    for name, spec in before.items():
        if isinstance(spec, MambaSpec):
            assert after[name].page_size_bytes == spec.page_size_bytes
        else:
            assert after[name] is spec


def test_blocks_without_a_token_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a state block of at least 1 token, got 0"):
        with_state_blocks(specs_of(16), 0)

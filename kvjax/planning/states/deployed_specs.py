"""How a deployment keeps a model's recurrent states.

Flow:    specs of a model's layers, options -> [deployed_specs] -> specs -> plan_kv_cache
"""

from __future__ import annotations

from collections.abc import Mapping

from kvjax.core.spec import KVCacheSpec
from kvjax.planning.states.idle_states import with_idle_states
from kvjax.planning.states.state_blocks import with_state_blocks


def deployed_specs(
    specs: Mapping[str, KVCacheSpec], *, state_block_size: int | None, idle_state_dtype: str | None
) -> dict[str, KVCacheSpec]:
    """The specs `with_state_blocks`, then `with_idle_states`; None: without. Raises as they do."""
    if state_block_size is not None:
        specs = with_state_blocks(specs, state_block_size)
    if idle_state_dtype is not None:
        specs = with_idle_states(specs, idle_state_dtype)
    return dict(specs)


__all__ = ["deployed_specs"]

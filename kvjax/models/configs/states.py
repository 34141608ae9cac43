"""What a recurrent layer remembers of a sequence. No jax.

Flow:    a family's config -> [StateShapes] -> MambaSpec -> planner, StepCache.update_states
Source:  vLLM's model_executor/layers/mamba/mamba_utils.py for shapes and dtypes
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from kvjax.core.kinds.mamba import MambaSpec
from kvjax.core.spec import cdiv
from kvjax.models.configs.keys import WEIGHT_DTYPES, ConfigKeys


@dataclass(frozen=True)
class StateShapes:
    """Arrays of a recurrent layer's state; heads or channels, which devices split, come first."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str | None, ...]  # None: the model's
    lane_arrays: tuple[int, ...] = ()  # those whose kernels take whole lanes behind the heads on TPU
    num_units: int = 0  # heads that stay whole, or groups of them where heads share inputs; 0: channels are units
    token_shapes: tuple[tuple[int, ...], ...] = ()  # what a token adds to the last array, heads first; (): not told
    token_dtypes: tuple[str | None, ...] = ()  # None: the model's

    def spec(self, block_size: int, attention_bytes: int, dtype: str) -> MambaSpec:
        """A state per block, of the fewest multiples of `block_size` tokens that take as much in an attention layer.

        vLLM's rule, which keeps a cached state from costing more than the attention of its tokens; `attention_bytes`
        are those of one token, `dtype` is the model's.
        """
        dtypes, token_dtypes = (tuple(own or dtype for own in each) for each in (self.dtypes, self.token_dtypes))
        state = MambaSpec(
            block_size=block_size,
            shapes=self.shapes,
            dtypes=dtypes,
            mamba_cache_mode="align",
            token_shapes=self.token_shapes,
            token_dtypes=token_dtypes,
            lane_arrays=self.lane_arrays,
        )
        return replace(state, block_size=block_size * cdiv(state.state_bytes, block_size * attention_bytes))

    def splits(self, num_shards: int) -> bool:
        """Whether every one of so many devices can have whole units of all arrays."""
        return gcd(self.num_units, *(shape[0] for shape in self.shapes)) % num_shards == 0


def take_state_dtype(keys: ConfigKeys, key: str, default: str | None = None) -> str | None:
    """The dtype that a file asks for recurrent states, None where it asks for none; as vLLM reads it."""
    name = keys.take(key, default)
    return None if name is None else keys.take_choice(key, WEIGHT_DTYPES, default)

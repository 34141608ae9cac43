"""Sizes of Mamba layers. No jax.

Flow:    a family's config -> [Mamba1Config, Mamba2Config] -> layers.mamba, StateShapes
Source:  Mamba (arXiv 2312.00752); Mamba-2 (arXiv 2405.21060)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvjax.errors import ConfigError
from kvjax.models.configs.keys import MAX_TAPS, ConfigKeys
from kvjax.models.configs.states import StateShapes


@dataclass(frozen=True, kw_only=True)
class Mamba1Config:
    """One recurrence per channel."""

    num_channels: int
    state_dim: int
    num_taps: int  # inputs of the convolution, the token's own included
    dt_rank: int
    conv_bias: bool
    proj_bias: bool

    @property
    def state(self) -> StateShapes:
        """The last inputs of the convolution, the recurrence; both in the model's dtype, as in vLLM."""
        shapes = ((self.num_channels, self.num_taps - 1), (self.num_channels, self.state_dim))
        return StateShapes(shapes, (None, None))


@dataclass(frozen=True, kw_only=True)
class Mamba2Config:
    """One recurrence per head; heads of a group share b and c."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    num_taps: int
    conv_bias: bool
    proj_bias: bool
    out_bias: bool | None = None  # of the last projection; None: as the others
    in_scales: tuple[float, float, float, float, float] = (1.0,) * 5  # of gate, x, b, c and dt as they are projected
    has_norm: bool = True  # of what the gate is multiplied with
    gate_first: bool = True  # gate, then norm
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    scan_dtype: str | None = None  # of the recurrence's state; None: the model's

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise ValueError(f"expected Mamba groups that divide {self.num_heads} heads, got {self.num_groups}")

    @property
    def inner_size(self) -> int:
        """Numbers of all heads."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """What is convolved: x, b and c."""
        return self.inner_size + 2 * self.num_groups * self.state_dim

    @property
    def state(self) -> StateShapes:
        """The last inputs of the convolution, the recurrence; a token adds its x, dt and b."""
        return StateShapes(
            ((self.num_channels, self.num_taps - 1), (self.num_heads, self.head_dim, self.state_dim)),
            (None, self.scan_dtype),
            num_units=self.num_groups if self.num_groups > 1 else 0,
            token_shapes=((self.num_heads, self.head_dim), (self.num_heads,), (self.num_groups, self.state_dim)),
            token_dtypes=(None, "float32", None),
        )


def take_mamba2(keys: ConfigKeys, inner_size: int, said: str) -> Mamba2Config:
    """Sizes by the names of Granite 4 and Falcon-H1; a head's dimension of "auto" is what is left for it.

    `inner_size` is what the keys `said` say of all heads.
    """
    num_heads = keys.take_int("mamba_n_heads", 128)
    is_auto = keys.take("mamba_d_head", "auto") == "auto"
    head_dim = inner_size // num_heads if is_auto else keys.take_int("mamba_d_head")
    if num_heads * head_dim != inner_size:
        raise ConfigError(
            f"{keys.where}: expected mamba_n_heads * mamba_d_head to be {inner_size} ({said}), "
            f"got {num_heads} * {head_dim}"
        )
    return Mamba2Config(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=keys.take_int("mamba_n_groups", 1),
        state_dim=keys.take_int("mamba_d_state", 256),
        num_taps=keys.take_int("mamba_d_conv", 4, most=MAX_TAPS),
        conv_bias=keys.take_flag("mamba_conv_bias", True),
        proj_bias=keys.take_flag("mamba_proj_bias", False),
        dt_limit=take_dt_limit(keys),
    )


def take_dt_limit(keys: ConfigKeys) -> tuple[float, float]:
    """`time_step_limit`, whose infinity transformers 5 writes as an object."""
    given = keys.take("time_step_limit", [0.0, float("inf")])
    limits = [float(x["__float__"]) if isinstance(x, Mapping) else float(x) for x in given]
    if len(limits) != 2 or not 0 <= limits[0] < limits[1]:
        raise ConfigError(f"{keys.where}: expected 'time_step_limit' to be two growing numbers >= 0, got {given!r}")
    return limits[0], limits[1]

"""Host side of the KV cache: numpy state, no jax.

The names are those of `kvjax.core.serving`, for schedulers, and of `kvjax.core.extending`, for those who extend kvjax.
All load when the first one is asked for: the device layer, which needs plans alone, imports no managers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvjax.core.extending import *  # noqa: F403
    from kvjax.core.extending import __all__ as _extending
    from kvjax.core.serving import *  # noqa: F403
    from kvjax.core.serving import __all__ as _serving

    __all__ = [*_serving, *_extending]


def __getattr__(name: str) -> Any:
    if name == "__all__" or not name.startswith("_"):
        tiers = [import_module(f"{__name__}.{tier}") for tier in ("serving", "extending")]
        found: dict[str, Any] = {each: getattr(tier, each) for tier in tiers for each in tier.__all__}
        globals().update(found, __all__=list(found))
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

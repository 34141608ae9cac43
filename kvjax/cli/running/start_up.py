"""Starting jax for a command: its platform, how many devices, and where compiled steps are kept.

Flow:    arguments -> [start_jax] -> jax's configuration
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from typing import TYPE_CHECKING

from kvjax.cli.options.types import positive_int
from kvjax.errors import ConfigError

if TYPE_CHECKING:
    from jax.sharding import Mesh


def add_start_arguments(group: argparse._ArgumentGroup) -> None:
    """`--devices` and `--no-compilation-cache`, for `start_jax`."""
    group.add_argument("--devices", type=positive_int, default=1, metavar="N", help="Split the heads over N devices.")
    group.add_argument(
        "--no-compilation-cache",
        action="store_true",
        help="Keep no compiled steps in ~/.cache/kvjax for the next run, as does JAX_ENABLE_COMPILATION_CACHE=false.",
    )


def start_jax(num_devices: int, *, keep_compiled: bool) -> Mesh | None:
    """The mesh that heads are split over; None: one device.

    Raises:
        ConfigError: jax has no package for the platform that it is told of.
        ValueError: there are fewer devices.
        RuntimeError: there is no device.
    """
    import jax

    from kvjax.device import Placement

    if keep_compiled:
        from kvjax.device.programs.compilation_cache import use_compilation_cache

        use_compilation_cache()
    if num_devices > 1:
        with suppress(RuntimeError):  # jax runs already: its devices are what they are
            jax.config.update("jax_num_cpu_devices", num_devices)
    check_platform()
    return Placement.over_heads(num_devices).mesh if num_devices > 1 else None


def check_platform() -> None:
    """Starts jax.

    Raises:
        ConfigError: jax is told of a platform that it has no package for, where it would fail an assertion of its own.
        RuntimeError: it has a package, but no device.
    """
    import jax

    try:
        jax.devices()
    except AssertionError as error:
        raise ConfigError(
            f"expected JAX_PLATFORMS of a platform that jax can run on here, got {jax.config.jax_platforms!r}; install "
            "jax for it, such as pip install 'kvjax[cuda]', or set JAX_PLATFORMS=cpu"
        ) from error

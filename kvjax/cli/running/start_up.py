"""Starting jax for a command: its platform, how many devices, and where compiled steps are kept.

Flow:    arguments -> [start_jax] -> jax's configuration
"""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvjax.cli.options.types import positive_int
from kvjax.errors import ConfigError

if TYPE_CHECKING:
    from jax.sharding import Mesh


def add_start_arguments(group: argparse._ArgumentGroup) -> None:
    """`--devices` and `--no-compilation-cache`, for `start_jax`."""
    group.add_argument(
        "--devices", type=positive_int, default=1, metavar="N", help="split the heads over N devices (1)"
    )
    group.add_argument(
        "--no-compilation-cache",
        action="store_true",
        help="keep no compiled steps in ~/.cache/kvjax for the next run (as does JAX_ENABLE_COMPILATION_CACHE=false)",
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


def use_compilation_cache() -> None:
    """Keeps compiled steps in the user's cache folder, unless jax has a place for them or there is no such folder.

    Every program is kept, however fast it compiled, unless jax is told otherwise: a command has many small ones.
    """
    import jax

    if jax.config.jax_compilation_cache_dir is not None:
        return
    with suppress(OSError, RuntimeError):  # RuntimeError: the user has no home
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvjax" / "jax"
        folder.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

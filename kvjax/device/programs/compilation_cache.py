"""Where compiled programs are kept for later processes.

Flow:    command, EngineConfig.compilation_cache -> [use_compilation_cache] -> jax's persistent compilation cache
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import jax


def use_compilation_cache(folder: str | Path | None = None) -> None:
    """Keeps this process's compiled programs in `folder`; None: in the user's cache folder, unless jax has a place.

    Every program is kept, however fast it compiled, unless jax is told otherwise: an engine has many small ones. No
    `folder` and no user's folder that can be made: none is kept. Who may write there may run code here.

    Raises:
        ValueError: jax keeps them in another folder; a process has one.
        OSError: `folder` cannot be made.
    """
    known = jax.config.jax_compilation_cache_dir
    if known is not None:
        if folder is not None and os.path.realpath(folder) != os.path.realpath(known):
            raise ValueError(
                f"expected the compilation cache of this process, {known}, got {folder}; give one folder to all engines"
            )
        return
    if folder is not None:
        _keep_in(Path(folder))
        return
    with suppress(OSError, RuntimeError):  # RuntimeError: the user has no home
        _keep_in(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvjax" / "jax")


def _keep_in(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


__all__ = ["use_compilation_cache"]

"""The card, its driver, its clocks, and versions: python -m scripts.first_light.programs.facts

Nothing is wrong here where there is no card: the answer says so.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import sys
from typing import Any

_QUERY = (
    "name,driver_version,memory.total,pcie.link.gen.max,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit"
)
_PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "numpy",
    "torch",
    "flashinfer-python",
    "flash-attn",
)


def nvidia_smi() -> dict[str, str]:
    """Its answers by the name of the question; {} without it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stdout.strip() or done.stderr.strip()}
    return dict(zip(_QUERY.split(","), (cell.strip() for cell in done.stdout.splitlines()[0].split(",")), strict=True))


def versions() -> dict[str, str]:
    """Versions of Python, and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device() -> dict[str, Any]:
    """What jax says of its first device."""
    import jax

    first = jax.devices()[0]
    names = ("platform", "device_kind", "compute_capability", "core_count")
    return {name: getattr(first, name) for name in names if hasattr(first, name)}


def main() -> int:
    """Prints the facts."""
    from scripts.first_light.programs.answer import answer

    seen, smi = device(), nvidia_smi()
    words = f"{seen.get('device_kind')}, driver {smi.get('driver_version', 'none')}, jax {versions()['jax']}"
    return answer(words, device=seen, nvidia_smi=smi, versions=versions())


if __name__ == "__main__":
    sys.exit(main())

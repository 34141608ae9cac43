"""A pytest plugin: vLLM from its sources takes the CPU for its device, as its CPU wheel does by its version.

Flow:    pytest -p on_cpu -> vllm.platforms.current_platform is the CPU's, before any test module is imported
"""

from __future__ import annotations


def pytest_configure() -> None:
    """Sets what `vllm.platforms` would find out on first use.

    Model classes are looked at in this process, since a new one would find no device.
    """
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()

    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()

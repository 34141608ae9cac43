"""The demo: a small Gemma-3-shaped model that ships with the package, and conversations for it."""

from __future__ import annotations

from pathlib import Path

from kvjax.demo.conversations import DemoRequest, demo_requests


def demo_model_path() -> Path:
    """The folder of the demo model: config.json, model.safetensors, tokenizer.json."""
    return Path(__file__).parent / "model"


__all__ = ["DemoRequest", "demo_model_path", "demo_requests"]

"""Measuring an engine on a real model, next to Hugging Face. Importing the package loads neither jax nor torch."""

__all__ = ["measure", "report"]

"""Layers that attend to what the cache keeps: per head, to latents, and to entries."""

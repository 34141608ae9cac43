"""Attention kinds: one file per kind, holding its spec and its manager."""

"""Layers whose state stands for all tokens before: Mamba, the delta rule, and their parts."""

"""Inputs that are not tokens: the encoder's program and cache, and vectors that stand for tokens."""

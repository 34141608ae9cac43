"""Families made of parts that others have: a config each, most of it a table of values. No jax."""

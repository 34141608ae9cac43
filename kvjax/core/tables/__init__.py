"""Stretches of block tables over many rows: what a step releases, appends or registers."""

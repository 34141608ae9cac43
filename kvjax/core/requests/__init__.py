"""Requests: their tokens and counts, in a table of rows while they run."""

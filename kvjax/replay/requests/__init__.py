"""Requests of a trace: read or generated, with tokens, and on their way through a replay."""

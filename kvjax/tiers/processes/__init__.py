"""Tiers of an engine on several processes: each keeps its own parts, and all decide alike."""

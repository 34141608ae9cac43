"""The scheduler's side of the tiers: what is kept where, and which loads are in flight."""

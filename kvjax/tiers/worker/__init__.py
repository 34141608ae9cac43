"""The worker's side of the tiers: units travel beside the steps, or in virtual time."""

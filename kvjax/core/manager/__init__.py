"""All groups of a deployment behind one manager: lookups, slots, steps, forks, pins, admission."""

"""Hashes of full blocks of tokens: what decides them, their encodings, and what else goes into them beside tokens."""

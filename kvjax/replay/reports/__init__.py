"""Results of replays for people (text) and for programs (JSON-ready values)."""

"""Steps, caches and answers with which converted metadata is checked against a stack's own reference attention."""

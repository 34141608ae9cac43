"""What makes drafts: a request's own tokens or a draft model, and whether they are worth it."""

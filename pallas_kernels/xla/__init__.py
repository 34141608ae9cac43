"""What the vectorised XLA paths of all families share."""

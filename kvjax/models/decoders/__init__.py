"""A decoder per family of models, each in a file of its own."""

"""A config class per family of models, each in a file of its own. No jax."""

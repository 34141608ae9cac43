"""Host side of the KV cache: numpy state, no jax."""

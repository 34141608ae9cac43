"""How tokens are chosen: the sampler in the jitted step, and its parameters by row."""

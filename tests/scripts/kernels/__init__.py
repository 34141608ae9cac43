"""Scripts that bench, tune and try kernels, and compile them for GPU."""

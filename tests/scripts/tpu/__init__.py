"""Scripts that compile, bench and race kernels for TPU."""

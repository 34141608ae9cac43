"""Ahead-of-time compilation of the TPU kernels on a machine without a TPU, and reading the compiler's dumps."""

"""Ahead-of-time compilation of the GPU kernels on a machine without a GPU, and reading the compiler's dumps."""

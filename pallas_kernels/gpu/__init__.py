"""What the GPU kernels of all families share."""

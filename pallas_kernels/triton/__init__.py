"""What the Triton kernels of all families share."""

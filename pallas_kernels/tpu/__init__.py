"""What the TPU kernels of all families share."""

"""What the ahead-of-time compilers for TPU and GPU share: cases, and the arguments that stand for them."""

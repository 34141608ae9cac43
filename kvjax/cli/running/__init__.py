"""Around a command's work: start of jax, progress, interrupts, and files for what it found."""

"""What the tuners for TPU and GPU share: cases, the choice of sizes, and the run over both."""

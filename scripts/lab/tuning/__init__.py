"""What the tuners for TPU and GPU share: entries, the choice of sizes, and the run over both."""

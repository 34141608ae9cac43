"""Random and adversarial trials of every op of pallas_kernels against float64 oracles: see scripts/fuzz_kernels.py."""

"""Benchmarks of the kernels, for scripts/bench_tpu.py and scripts/bench_gpu.py: an op is one module of `ops`."""

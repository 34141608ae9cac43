"""Benchmarks of the kernels, for scripts/bench_tpu.py and scripts/bench_gpu.py: they know ops by their cases."""

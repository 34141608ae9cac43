"""Drivers that know ops by their cases alone: benchmarks, compilation ahead of time for TPU and GPU, tuning."""

"""Cases of `scripts/bench_host.py`, one module per part of the host core."""

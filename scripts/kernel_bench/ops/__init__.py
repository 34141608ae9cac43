"""The benchmarked ops, a module each: `cases(sizes)` gives its cases."""

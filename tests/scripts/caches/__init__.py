"""Scripts that time, compare and try managers of caches."""

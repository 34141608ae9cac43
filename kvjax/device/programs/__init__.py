"""Traced programs: whether two are equal, where one may be cut, and how many XLA makes."""

"""Tests of the attention kinds."""

"""Tiers beyond the pools."""

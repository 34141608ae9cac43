"""Devices of a deployment: which axes split what, how processes join, and how host arrays get there."""

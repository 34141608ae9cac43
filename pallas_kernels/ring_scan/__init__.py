"""The recurrence of Mamba 2 over ring states: a base state and what the tokens since then add to it."""

from pallas_kernels.ring_scan.api import RingScanOutput, ScanRing, ring_scan

__all__ = ["RingScanOutput", "ScanRing", "ring_scan"]

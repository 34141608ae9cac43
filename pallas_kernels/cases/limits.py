"""Limits of the paths over KV tiles by which small steps take several trips, lanes and pieces."""

from __future__ import annotations

from pallas_kernels.triton import walks
from pallas_kernels.xla import tiles

SMALL_TRIPS = tiles.Limits(trip_bytes=1 << 13, pieces_bytes=1 << 13, least_keys=8, most_keys=16)
SMALL_PROGRAMS = walks.Limits(programs=6, few_tiles=0, most_keys=16)

"""Readers of the trace files that people have; one file per form, each with how it looks.

Flow:    file, TraceReading -> [read_trace] -> TraceRequest list
"""

from kvjax.replay.readers.read import read_trace
from kvjax.replay.readers.reading import TraceReading

__all__ = ["TraceReading", "read_trace"]

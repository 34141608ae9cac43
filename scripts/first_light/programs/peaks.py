"""What the card does at most, by the clock of the rows: python -m scripts.first_light.programs.peaks [--dry-run]

Bytes per second of a copy, operations per second of a bfloat16 product; rows' shares are of these.
"""

from __future__ import annotations

import sys

from scripts.first_light.programs.answer import answer
from scripts.lab.bench.gpu_timing import measured_peaks
from scripts.lab.bench.timing import wall_clock


def main(arguments: list[str]) -> int:
    """Measures and prints."""
    small = {"copied_bytes": 1 << 16, "matrix": 64} if "--dry-run" in arguments else {}
    peaks = measured_peaks(wall_clock, **small)
    words = f"copy {peaks.bytes_per_s / 1e12:.3f} TB/s, product {peaks.flops_per_s / 1e12:.1f} TFLOP/s"
    return answer(words, bytes_per_s=peaks.bytes_per_s, flops_per_s=peaks.flops_per_s, source=peaks.source)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

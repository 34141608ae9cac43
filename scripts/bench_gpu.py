"""Times every kernel on an NVIDIA GPU, next to the reference jitted by XLA and to other attention kernels.

    python scripts/bench_gpu.py --json gpu.json --plot roofline.png                all ops and shapes
    python scripts/bench_gpu.py --op ragged_paged_attention --shape llama3-8b      one op and shape
    python scripts/bench_gpu.py --op kv_write --dry-run                            as where there is no GPU

Flow:    cases of every op -> [bench_gpu] -> table on the terminal, `--json FILE`, `--plot FILE`

The time of a call is that of its kernels by the profiler (CUPTI), over a program of several calls on rotated page
buffers that are together larger than twice the L2 cache; where there is no CUPTI, and for ops that write donated pages,
the wall clock around a batch of programs, less an empty call (`clock` in the JSON; lab/bench/gpu_timing.py). Printed
are medians and the distance of the quartiles. Shares are of the bandwidth of a copy and of the throughput of a matrix
product measured first, in the same run, for the bytes and operations that the op cannot do without.

Next to attention stand upstream JAX's paged attention, cuDNN's by `jax.nn.dot_product_attention`, and PyTorch's
scaled_dot_product_attention and FlexAttention where torch is installed, each where it can do the case
(lab/bench/rivals_gpu.py says what they are given). Before it is timed each kernel is compared with the reference;
the exit status is 1 if one is wrong or fails.

Without a GPU each case runs once at a small size, interpreted (`--by-reference`: by the reference, quicker), and is
compared with the reference. The table then has the bytes and operations of the full size, and no times.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# The interpreter of GPU kernels blocks a thread of XLA's for each warpgroup; XLA reads their number here.
os.environ.setdefault("NPROC", str(max(8, os.cpu_count() or 1)))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs room beside JAX

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvjax.cli.pictures.figures import save_figure
from kvjax.cli.running.output_files import plot_file, require_matplotlib
from kvjax.errors import MissingExtraError
from scripts.lab.bench import driver, roofline
from scripts.lab.bench.gpu_timing import gpu_clock, measured_peaks
from scripts.lab.bench.platform import Platform
from scripts.lab.bench.report import Peaks, is_wrong
from scripts.lab.bench.rivals_gpu import rivals

GPU = Platform(
    name="gpu",
    device_kind="cuda",
    pages=(16, 64),
    cache_bytes=60 << 20,  # L2 of an H200
    peaks=lambda device: measured_peaks(),
    time=gpu_clock,
    interpreted_calls=1,  # as the tests of the kernels run them
    rivals=rivals,
)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 1 where a kernel is wrong or fails."""
    parser = driver.parser(__doc__, GPU)
    parser.add_argument("--plot", type=plot_file, metavar="FILE", help="roofline of what was measured (png, pdf, svg)")
    options = parser.parse_args(arguments)
    try:
        cases = driver.picked(options, GPU)
        if options.plot is not None:
            require_matplotlib("--plot")
    except (ValueError, MissingExtraError) as error:
        parser.error(str(error))
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    if options.plot is not None and (options.dry_run or GPU.device() is None):
        parser.error("expected a GPU for --plot: a dry run has no times")
    found = driver.run(GPU, options, cases)
    if options.plot is not None:
        title = f"{found.about['device']}, jax {found.about['jax']}"
        save_figure(roofline.draw(found.rows, Peaks(**found.about["peaks"]), title), options.plot)
    return int(any(is_wrong(row) for row in found.rows))


if __name__ == "__main__":
    sys.exit(main())

"""Times every kernel on a TPU, next to the reference jitted by XLA and to upstream JAX's paged attention.

    python scripts/bench_tpu.py --json tpu.json                                    all ops and shapes
    python scripts/bench_tpu.py --op ragged_paged_attention --shape llama3-8b      one op and shape
    python scripts/bench_tpu.py --op kv_write --dry-run                            as where there is no TPU

Flow:    cases of every op -> [bench_tpu] -> table on the terminal, `--json FILE`

A TPU runs what was dispatched while Python goes on. A sample is therefore a batch of calls, long enough to keep the
chip busy for 0.1 s, with `block_until_ready` around the whole, less the time of an empty call dispatched and waited
for. The calls of a batch are chained: by donated pages where the op writes, else by optimization barriers, over rotated
page buffers that are together larger than twice the chip's on-chip memory, so that no call finds its pages there.
Printed are the median of the samples and the distance between their quartiles; shares are of the chip's specified HBM
bandwidth and bfloat16 FLOPs (scripts/lab/tpu/chips.py), for the bytes and operations that the op cannot do without.
A step of few bytes (a decode step of kv_write) costs its launch, whatever its share.

Before it is timed each kernel is compared with the reference; the exit status is 1 if one is wrong or fails.

Without a TPU each case runs once at a small size, interpreted (`--by-reference`: by the reference, quicker), and is
compared with the reference. The table then has the bytes and operations of the full size, and no times.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.lab.bench import driver
from scripts.lab.bench.platform import Platform
from scripts.lab.bench.report import Peaks, is_wrong
from scripts.lab.bench.rivals_tpu import rivals
from scripts.lab.bench.timing import wall_clock
from scripts.lab.tpu.chips import CHIPS

# Names of chips in `jax.Device.device_kind`.
DEVICE_KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "v7x",
    "TPU v7x": "v7x",
}


def peaks(device: jax.Device) -> Peaks:
    """What the chip's specification says.

    Raises:
        ValueError: the chip is not in the table.
    """
    name = DEVICE_KINDS.get(device.device_kind)
    if name is None:
        raise ValueError(
            f"expected a chip out of {sorted(DEVICE_KINDS)}, got {device.device_kind!r}: add it to chips.py"
        )
    chip = CHIPS[name]
    return Peaks(chip.hbm_bytes_per_s, chip.bf16_flops_per_s, f"specification of {name}")


TPU = Platform(
    name="tpu",
    device_kind="tpu",
    pages=(16, 128),
    cache_bytes=max(chip.vmem_bytes for chip in CHIPS.values()),
    peaks=peaks,
    time=wall_clock,
    interpreted_calls=2,
    rivals=rivals,
)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 1 where a kernel is wrong or fails."""
    parser = driver.parser(__doc__, TPU)
    options = parser.parse_args(arguments)
    try:
        cases = driver.picked(options, TPU)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    return int(any(is_wrong(row) for row in driver.run(TPU, options, cases).rows))


if __name__ == "__main__":
    sys.exit(main())

"""The process that times: python -m scripts.lab.bench.time_cases [OP CASES] -> one line of JSON.

Without arguments: the name of this machine's card, or null. CASES: a JSON object of cases by name, each the fields of
the op's case. A process of its own, because a kernel that fails takes the CUDA context with it.

    {"decode": microseconds, "prefill": microseconds}
"""

from __future__ import annotations

import json
import sys

from pallas_kernels.cases.case import Case
from pallas_kernels.cases.find import case_types
from pallas_kernels.gpu.mosaic import card_name
from scripts.lab.bench.chain import Chain, num_rotated
from scripts.lab.bench.timing import wall_clock
from scripts.lab.gpu.target import CARDS

_REPEATS = 10


def median_us(case: Case, cache_bytes: int) -> float:
    """Time of a call on the default device, over arguments that no cache holds."""
    rotated = [case.arguments(seed) for seed in range(num_rotated(case.work.num_bytes, cache_bytes))]
    chain = Chain(lambda pages, rest: case.call("gpu", pages, rest), rotated, writes=case.writes)
    return wall_clock(chain, _REPEATS).median_us


def main(arguments: list[str]) -> None:
    """Prints the line."""
    card = card_name()
    if not arguments:
        print("\n" + json.dumps(card))
        return
    op, text = arguments
    if card not in CARDS:
        raise SystemExit(f"expected a card out of {sorted(CARDS)}, got {card}")
    cases = {name: case_types()[op](**fields) for name, fields in json.loads(text).items()}
    print("\n" + json.dumps({name: median_us(case, CARDS[card].l2_bytes) for name, case in cases.items()}))


if __name__ == "__main__":
    main(sys.argv[1:])

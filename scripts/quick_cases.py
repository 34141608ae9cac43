"""Writes tests/quick_cases.json: of which parametrized tests the test command runs a few cases, the others are sweeps.

Usage:   scripts/test.sh --junitxml run.xml, then python scripts/quick_cases.py run.xml [--seconds 1] [--share 8]
Flow:    seconds of every case of a whole run -> tests whose cases take long together -> how many cases are kept

A test keeps one case in `--share`, at least one; cases are spread evenly over their order. Tests that are named in
`WHOLE` keep all, in `SHARES` one in so many, out of step with the levels of their parameters, in `SWEPT` none: those
are long, and a shorter test fails too where most of their faults are. `pytest -m sweep` runs the others.
"""

from __future__ import annotations

import argparse
import json
import math
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

OUT = Path(__file__).parent.parent / "tests" / "quick_cases.json"
# By the beginning of a node id: cases that are cheap one by one and are the law: every pool size, every block of code.
WHOLE = ("tests/core/", "tests/replay/", "tests/test_architecture.py", "tests/test_docs.py")
SHARES = {
    "tests/core/manager/test_fork.py::test_everyone_reads_back_its_own_tokens": 3,
    "tests/core/manager/test_step_planner.py::test_a_planned_step_equals_its_calls": 2,
    "tests/core/save/test_manager_state.py::test_restored_and_continued_equals_continued": 2,
    "tests/models/test_families.py::test_prefill_and_decoding_are_hugging_faces": 3,
    "tests/device/test_flags.py::test_a_step_computes_the_same": 2,
    "tests/pallas_kernels/test_flags.py::test_an_op_computes_the_same": 220,
    "tests/pallas_kernels/test_flags.py::test_an_op_is_the_same_program": 30,
}
RAGGED, LATENT, SPARSE = (f"tests/pallas_kernels/{op}_attention" for op in ("ragged_paged", "mla_paged", "sparse_mla"))
SWEPT = (
    f"{RAGGED}/test_kernel_gpu.py::test_a_scale_of_keys_may_be_negative",
    f"{RAGGED}/test_kernel_gpu.py::test_cross_attention_may_have_more_queries_than_keys",
    f"{RAGGED}/test_kernel_gpu.py::test_extreme_sinks_do_not_overflow",
    f"{RAGGED}/test_kernel_tpu.py::test_a_sink_without_bound_is_as_in_the_reference",
    f"{RAGGED}/test_kernel_tpu.py::test_cross_attention_may_have_more_queries_than_keys",
    f"{RAGGED}/test_kernel_tpu.py::test_float8_pages_may_be_products_operands",
    f"{RAGGED}/test_kernel_tpu.py::test_order_of_pages_does_not_matter",
    f"{RAGGED}/test_tpu_ring.py::test_sequences_may_follow_each_other_in_any_order",
    f"{LATENT}/test_kernel_tpu.py::test_queries_before_position_0_see_nothing",
    f"{LATENT}/test_kernel_tpu.py::test_results_overwritten_on_their_way_out_are_found",
    f"{SPARSE}/test_kernel_gpu.py::test_an_empty_step",
    f"{SPARSE}/test_kernel_tpu.py::test_more_picks_than_a_part",
    f"{SPARSE}/test_kernel_tpu.py::test_states_between_passes_take_few_bytes",
    "tests/cli/test_generate.py::test_hits_inside_blocks_misses_and_the_policy",
    "tests/cli/test_generate_speculation.py::test_prompt_lookup_writes_the_demos_text_in_fewer_steps",
    "tests/engine/mesh/test_mesh.py::test_four_devices_give_the_same_tokens",
    "tests/engine/drafts/test_speculation_sampling.py::test_every_seed_gives_the_tokens_that_it_gives_without_drafts",
    "tests/models/test_families_on_devices.py::test_four_devices_give_the_same_tokens",
    "tests/models/test_families_speculation.py::test_a_draft_model_of_random_weights_changes_no_token",
    "tests/models/test_flags.py::test_a_family_computes_the_same",
    "tests/pallas_kernels/compressor_update/test_kernel_tpu.py::test_a_planted_race_is_found",
    "tests/scripts/test_kernel_tuning.py::test_tuning_writes_what_compiles_best",
)


def seconds_of_cases(path: Path) -> dict[str, list[float]]:
    """Seconds of each case, by the test's node id, of a run that pytest wrote as JUnit XML."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        module = case.get("classname", "").replace(".", "/") + ".py"
        seconds[f"{module}::{case.get('name', '').split('[')[0]}"].append(float(case.get("time", 0)))
    return seconds


def kept_cases(seconds: dict[str, list[float]], least_seconds: float, share: int) -> dict[str, int]:
    """Cases that a test keeps, for those that take `least_seconds` together."""
    kept = {
        test: max(1, math.ceil(len(cases) / share))
        for test, cases in seconds.items()
        if len(cases) > 1 and sum(cases) >= least_seconds and not test.startswith(WHOLE)
    }
    kept |= {test: _out_of_step(len(seconds[test]), own) for test, own in SHARES.items() if test in seconds}
    kept |= {test: 0 for test in SWEPT if test in seconds}
    return dict(sorted(kept.items()))


def _out_of_step(num_cases: int, share: int) -> int:
    """One case in `share`, and one more where these would stand a whole number apart, perhaps all of one level."""
    count = math.ceil(num_cases / share)
    return count + (num_cases % count == 0)


def main() -> None:
    """Writes the file, and says what it saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("junit", type=Path, help="JUnit XML of a run of all cases")
    parser.add_argument("--seconds", type=float, default=1.0, help="tests of so many in all (default: 1)")
    parser.add_argument("--share", type=int, default=8, help="one case in so many is kept (default: 8)")
    args = parser.parse_args()
    seconds = seconds_of_cases(args.junit)
    kept = kept_cases(seconds, args.seconds, args.share)
    OUT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    before = sum(map(sum, seconds.values()))
    saved = sum(sum(seconds[test]) * (1 - count / len(seconds[test])) for test, count in kept.items())
    print(f"{before:,.0f} s of all cases; {before - saved:,.0f} s with {len(kept)} tests cut to a few")


if __name__ == "__main__":
    main()

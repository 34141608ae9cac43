"""Writes tests/quick_cases.json: of which parametrized tests the test command runs a few cases, the others are sweeps.

Usage:   scripts/test.sh --junitxml run.xml, then python scripts/quick_cases.py run.xml [--seconds 1] [--share 8]
Flow:    seconds of every case of a whole run -> tests whose cases take long together -> how many cases are kept

A test keeps one case in `--share`, at least one; cases are spread evenly over their order. Tests that are named in
`WHOLE` keep all, in `SHARES` one in so many, out of step with the levels of their parameters. `pytest -m sweep` runs
the others.
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
    "tests/cli/test_damaged_configs.py::test_bytes": 2,
    "tests/cli/test_damaged_configs.py::test_deployments": 2,
    "tests/cli/test_damaged_configs.py::test_models": 1.7,
    "tests/core/eviction/test_bulk_equivalence.py::test_a_planned_step_equals_its_calls": 3,
    "tests/core/eviction/test_bulk_equivalence.py::test_a_planned_step_equals_its_calls_in_slabs": 1.5,
    "tests/core/eviction/test_bulk_equivalence.py::test_rows_at_once_get_what_they_get_one_by_one": 1.7,
    "tests/core/eviction/test_policies.py::test_agrees_with_its_naive_model": 5.5,
    "tests/core/kinds/test_contract.py::test_a_planned_step_equals_its_calls": 1.9,
    "tests/core/kinds/test_contract.py::test_needed_blocks_are_taken_and_a_refusal_lacks_them": 3,
    "tests/core/kinds/test_contract.py::test_the_common_prefix_agrees_with_brute_force": 1.9,
    "tests/core/kinds/test_retention.py::test_a_prompt_that_comes_again_hits_as_much_as_ever": 5.2,
    "tests/core/manager/test_answer_states.py::test_the_last_state_of_an_answer_stays_and_those_of_the_interval": 5.7,
    "tests/core/manager/test_can_admit.py::test_it_tells_what_an_admission_would_leave": 3,
    "tests/core/manager/test_drafts_beside_all.py::test_requests_read_their_own_and_hits_are_what_they_say": 5.8,
    "tests/core/manager/test_exhaustion.py::test_a_refused_call_changes_nothing_at_any_pool_size": 3.8,
    "tests/core/manager/test_fork.py::test_everyone_reads_back_its_own_tokens": 20.2,
    "tests/core/manager/test_inner_hits.py::test_whoever_starts_from_a_hit_finds_its_tokens": 5.6,
    "tests/core/manager/test_invalidation.py::test_agrees_with_the_naive_model": 3,
    "tests/core/manager/test_kv_cache_manager_machine.py::test_agrees_with_the_naive_model": 6,
    "tests/core/manager/test_loads.py::test_everyone_attends_to_what_was_loaded": 41.2,
    "tests/core/manager/test_lookups_of_every_policy.py::test_a_lookup_finds_what_is_registered": 8,
    "tests/core/manager/test_pinning.py::test_pins_hold_among_random_forks": 1.8,
    "tests/core/manager/test_prefix_hits.py::test_hits_agree_with_brute_force": 2,
    "tests/core/manager/test_reservations.py::test_every_admitted_request_finishes": 3.8,
    "tests/core/manager/test_settle_drafts.py::test_caches_what_a_manager_caches_that_never_drafted": 2,
    "tests/core/manager/test_settle_drafts.py::test_every_pool_size_ends_all_requests_or_refuses_them": 7,
    "tests/core/manager/test_settle_drafts.py::test_every_pool_size_with_states_of_answers": 3.4,
    "tests/core/manager/test_settle_drafts.py::test_states_of_answers_are_those_of_a_manager_that_never_drafted": 1.9,
    "tests/core/manager/test_shared_prompts.py::test_all_but_the_first_two_hit_what_they_share": 3,
    "tests/core/manager/test_states_on_the_way.py::test_requests_read_their_own_states": 3.6,
    "tests/core/manager/test_step_planner.py::test_a_planned_step_equals_its_calls": 4.4,
    "tests/core/manager/test_sub_block_hits.py::test_everyone_reads_back_its_own_tokens": 3.8,
    "tests/core/manager/test_sub_block_hits.py::test_hits_are_those_of_a_brute_force_search": 1.9,
    "tests/core/manager/test_take_back_step.py::test_whatever_is_a_hit_is_written": 41.2,
    "tests/core/misses/test_miss_reasons.py::test_every_report_is_what_a_search_by_brute_force_says": 3,
    "tests/core/record/test_call_recorder.py::test_hits_inside_blocks_replay_to_the_same_ids": 1.5,
    "tests/core/record/test_call_recorder.py::test_recorded_runs_replay_to_the_same_ids": 8.9,
    "tests/core/record/test_call_recorder.py::test_runs_under_other_policies_replay": 2,
    "tests/core/save/test_hostile_states.py::test_values_that_were_changed_and_sealed_again": 8.1,
    "tests/core/save/test_manager_state.py::test_deployments_with_reservations_and_more_continue_alike": 13.7,
    "tests/core/save/test_manager_state.py::test_restored_and_continued_equals_continued": 4.4,
    "tests/core/slabs/test_slab_memory.py::test_in_lock_step_with_lists": 1.9,
    "tests/core/slabs/test_slab_memory.py::test_what_fits_can_be_taken_in_any_order": 2.8,
    "tests/device/mesh/test_peers.py::test_the_others_name_the_lost_one_and_end": 2,
    "tests/device/pages/test_idle_states.py::test_moves_agree_with_numpy_and_touch_nothing_else": 2,
    "tests/device/steps/test_flags.py::test_a_step_computes_the_same": 8.8,
    "tests/engine/requests/test_given_arrays.py::test_prompts_and_inputs_are_what_they_were_when_they_were_given": 3,
    "tests/engine/requests/test_owed_request.py::test_a_request_that_is_taken_up_ends_as_it_would_have": 3,
    "tests/engine/requests/test_request_errors.py::test_a_matcher_that_raises_ends_its_request_and_nothing_else": 2,
    "tests/engine/scheduling/test_hit_counts.py::test_prompts_that_begin_differently_hit_nothing": 4,
    "tests/engine/scheduling/test_loading.py::test_the_least_urgent_give_way": 5,
    "tests/engine/scheduling/test_schedules.py::test_every_schedule_gives_the_tokens_of_each_request_alone": 8,
    "tests/engine/step/test_exceptions.py::test_a_step_that_is_broken_off_is_undone": 13.3,
    "tests/engine/step/test_exceptions.py::test_a_step_with_drafts_that_is_broken_off_is_undone": 16,
    "tests/engine/step/test_shared_faults.py::test_a_lying_store_never_gives_a_wrong_token": 2.5,
    "tests/engine/step/test_shared_faults.py::test_a_server_that_is_killed_at_any_moment": 3,
    "tests/engine/step/test_shared_tier.py::test_below_a_host_a_disk_or_neither": 3,
    "tests/engine/step/test_shared_tier.py::test_the_second_engine_hits_what_the_first_computed": 2.4,
    "tests/engine/step/test_tiers.py::test_a_disk_lock_that_stays_held_costs_one_wait": 2,
    "tests/events/sockets/test_subscriber_model.py::test_the_index_is_right_or_does_not_know_all": 1.9,
    "tests/events/test_cached_blocks.py::test_a_snapshot_rebuilds_what_is_cached": 1.8,
    "tests/models/released/test_released.py::test_a_cache_is_planned": 2,
    "tests/models/released/test_released.py::test_a_small_one_of_it_runs": 2,
    "tests/models/states/test_state_blocks.py::test_a_hit_at_every_length_goes_on_as_hugging_face_does": 3,
    "tests/models/states/test_state_blocks.py::test_a_hit_inside_an_answer_goes_on_as_hugging_face_does": 1.5,
    "tests/models/states/test_state_blocks.py::test_a_named_checkpoint_is_hit_by_the_next_prompt": 1.5,
    "tests/models/test_families.py::test_prefill_and_decoding_are_hugging_faces": 3.5,
    "tests/pallas_kernels/gated_delta_rule/test_tpu.py::test_segments_end_at_checkpoints": 1.5,
    "tests/pallas_kernels/ragged_paged_attention/test_own_sinks.py::test_a_query_sees_its_own_sequences_prompt_and_a_window": 2,  # noqa: E501
    "tests/pallas_kernels/ring_delta_rule/test_tpu.py::test_arrays_of_one_column_stay_in_one_memory": 2,
    "tests/pallas_kernels/ring_delta_rule/test_tpu.py::test_equals_the_recurrence": 2,
    "tests/pallas_kernels/ring_scan/test_tpu_scan.py::test_equals_the_attention": 2.5,
    "tests/pallas_kernels/ssm_update/test_tpu_scan.py::test_segments_end_at_checkpoints": 3,
    "tests/pallas_kernels/test_checkpoints.py::test_checkpoints_are_left_on_the_way": 1.8,
    "tests/pallas_kernels/test_checkpoints.py::test_columns_without_a_checkpoint_change_nothing": 1.8,
    "tests/pallas_kernels/test_checkpoints.py::test_every_length_equals_two_steps": 1.5,
    "tests/pallas_kernels/test_flags.py::test_an_op_computes_the_same": 330,
    "tests/pallas_kernels/test_flags.py::test_an_op_is_the_same_program": 143.9,
    "tests/pallas_kernels/test_gpu_in_slabs.py::test_a_kernel_gives_the_same_in_slabs": 3.7,
    "tests/pallas_kernels/test_in_slabs.py::test_an_op_gives_the_same_in_slabs": 1.7,
    "tests/pallas_kernels/test_laws.py::test_agrees_with_the_oracle": 2.4,
    "tests/pallas_kernels/test_one_token.py::test_one_token_of_any_name": 1.9,
    "tests/pallas_kernels/test_slab_pages.py::test_pages_are_written_and_read_as_in_arrays_of_their_own": 2,
    "tests/pallas_kernels/test_toy_op.py::test_it_is_held_to_the_laws": 2,
    "tests/pallas_kernels/test_tpu_decode_step.py::test_a_planned_decode_equals_the_oracle": 2,
    "tests/pallas_kernels/test_tpu_in_slabs.py::test_an_op_gives_the_same_in_slabs": 6.5,
    "tests/planning/test_plan_holds.py::test_as_many_as_planned_run_in_one_memory": 1.9,
    "tests/replay/beyond/test_tiers.py::test_the_youngest_gives_way_whether_it_runs_or_loads": 2,
    "tests/replay/bounds/test_belady.py::test_no_policy_hits_more": 3.4,
    "tests/replay/replicas/test_fleet_tiers.py::test_a_router_is_told_the_hits_that_follow": 1.6,
    "tests/replay/test_misses.py::test_what_the_infinite_cache_hits_besides_lacks_a_checkpoint_or_was_evicted": 1.8,
    "tests/replay/test_working_set.py::test_the_load_of_a_trace_hits_as_much_as_the_best_of_twenty_splits": 1.5,
    "tests/tiers/scheduler/test_tier_scheduler.py::test_data_ranks_load_what_another_computed_and_nothing_else": 24,
    "tests/tiers/shared/test_redis.py::test_every_call_ends_in_time": 3,
    "tests/transfer/test_entries.py::test_latents_are_what_was_written": 2,
}


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
    return dict(sorted(kept.items()))


def _out_of_step(num_cases: int, share: float) -> int:
    """One case in `share`, and one more where these would stand a whole number apart, perhaps all of one level."""
    count = math.ceil(num_cases / share)
    return count + (count > 1 and num_cases % count == 0)


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

"""Writes tests/quick_cases.json: of which parametrized tests the test command runs a few cases, the others are sweeps.

Usage:   scripts/test.sh --junitxml run.xml, then python scripts/quick_cases.py run.xml [--seconds 1] [--share 8]
Flow:    seconds of every case of a whole run -> tests whose cases take long together -> how many cases are kept

A test keeps one case in `--share`, at least one; cases are spread evenly over their order. Tests that are named in
`WHOLE` keep all, in `SHARES` one in so many, out of step with the levels of their parameters, in `SWEEPS` none.
`pytest -m sweep` runs the others.
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
    "tests/cli/replay/test_replay_forms.py::test_every_form_is_converted": 1.2,
    "tests/cli/test_damaged_configs.py::test_bytes": 2,
    "tests/cli/test_damaged_configs.py::test_deployments": 2,
    "tests/cli/test_damaged_configs.py::test_models": 10.2,
    "tests/cli/test_plan_command.py::test_every_shipped_model_can_be_planned": 1.1,
    "tests/core/eviction/test_bulk_equivalence.py::test_a_planned_step_equals_its_calls": 3,
    "tests/core/eviction/test_bulk_equivalence.py::test_a_planned_step_equals_its_calls_in_slabs": 1.5,
    "tests/core/eviction/test_bulk_equivalence.py::test_rows_at_once_get_what_they_get_one_by_one": 1.7,
    "tests/core/eviction/test_policies.py::test_agrees_with_its_naive_model": 5.5,
    "tests/core/kinds/test_contract.py::test_a_planned_step_equals_its_calls": 2.3,
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
    "tests/core/save/test_manager_state.py::test_restored_and_continued_equals_continued": 5,
    "tests/core/slabs/test_slab_memory.py::test_in_lock_step_with_lists": 2,
    "tests/core/slabs/test_slab_memory.py::test_what_fits_can_be_taken_in_any_order": 2.8,
    "tests/device/layers/test_lane_states.py::test_padded_states_compute_what_plain_ones_do": 4,
    "tests/device/layers/test_picked_tokens.py::test_served_requests_equal_dense_attention": 1.5,
    "tests/device/layers/test_wanted_rows.py::test_wanted_tokens_attend_as_among_all": 4,
    "tests/device/mesh/test_peers.py::test_the_others_name_the_lost_one_and_end": 2,
    "tests/device/model/test_weights_digest.py::test_one_number_or_two_that_change_places_make_another_digest": 12,
    "tests/device/pages/test_idle_states.py::test_moves_agree_with_numpy_and_touch_nothing_else": 8,
    "tests/device/steps/test_flags.py::test_a_step_computes_the_same": 26.4,
    "tests/device/steps/test_update_step.py::test_the_compiled_step_updates_the_pages_in_place": 2,
    "tests/engine/arguments/test_wrong_arguments.py::test_inputs_of_an_asyncio_engine": 1.7,
    "tests/engine/arguments/test_wrong_arguments.py::test_inputs_of_models_that_take_more_than_tokens": 4,
    "tests/engine/arguments/test_wrong_arguments.py::test_sampling_params": 3.3,
    "tests/engine/drafts/test_speculation_sampling.py::test_the_distribution_of_two_tokens_is_the_models": 40,
    "tests/engine/front/test_async_llm_engine.py::test_a_priority_that_is_none_is_refused_at_the_call_and_strands_nobody": 1.8,  # noqa: E501
    "tests/engine/front/test_async_llm_engine.py::test_whatever_ends_the_thread_every_caller_is_told": 1.7,
    "tests/engine/front/test_cache_keys.py::test_equal_keys_share_and_others_do_not": 4,
    "tests/engine/front/test_engine_weights.py::test_a_disk_is_not_of_another_config_with_the_same_weights": 2,
    "tests/engine/front/test_llm_engine.py::test_rules_of_every_release_give_the_same_tokens": 2,
    "tests/engine/requests/test_given_arrays.py::test_prompts_and_inputs_are_what_they_were_when_they_were_given": 3.8,
    "tests/engine/requests/test_owed_request.py::test_a_request_that_is_taken_up_ends_as_it_would_have": 3,
    "tests/engine/requests/test_request_errors.py::test_a_matcher_that_raises_ends_its_request_and_nothing_else": 2,
    "tests/engine/requests/test_request_errors.py::test_logits_that_are_no_numbers_end_their_request_and_nothing_else": 2,  # noqa: E501
    "tests/engine/requests/test_stream.py::test_a_stream_that_is_left_aborts_what_is_unfinished": 16,
    "tests/engine/scheduling/test_hit_counts.py::test_prompts_that_begin_differently_hit_nothing": 4,
    "tests/engine/scheduling/test_loading.py::test_the_least_urgent_give_way": 5,
    "tests/engine/scheduling/test_schedules.py::test_every_schedule_gives_the_tokens_of_each_request_alone": 12,
    "tests/engine/step/test_decode_buckets.py::test_tokens_are_the_same_in_programs_of_decoding_alone": 2,
    "tests/engine/step/test_exceptions.py::test_a_call_that_is_broken_off_leaves_none_of_its_requests": 16,
    "tests/engine/step/test_exceptions.py::test_a_step_that_is_broken_off_is_undone": 39.9,
    "tests/engine/step/test_exceptions.py::test_a_step_with_drafts_that_is_broken_off_is_undone": 32,
    "tests/engine/step/test_exceptions.py::test_an_interrupt_between_any_two_lines_of_a_step_loses_nothing": 24,
    "tests/engine/step/test_shared_faults.py::test_a_lying_store_never_gives_a_wrong_token": 5,
    "tests/engine/step/test_shared_faults.py::test_a_server_that_is_killed_at_any_moment": 3,
    "tests/engine/step/test_shared_faults.py::test_beside_a_dead_store_nothing_but_probes_is_sent_once_it_is_known": 2,
    "tests/engine/step/test_shared_faults.py::test_random_faults_of_every_kind": 2,
    "tests/engine/step/test_shared_tier.py::test_below_a_host_a_disk_or_neither": 3,
    "tests/engine/step/test_shared_tier.py::test_the_second_engine_hits_what_the_first_computed": 4.8,
    "tests/engine/step/test_tiers.py::test_a_disk_lock_that_stays_held_costs_one_wait": 2,
    "tests/events/sockets/test_late_subscribers.py::test_a_late_router_knows_an_idle_replica": 2,
    "tests/events/sockets/test_subscriber_model.py::test_the_index_is_right_or_does_not_know_all": 1.9,
    "tests/events/test_cached_blocks.py::test_a_snapshot_rebuilds_what_is_cached": 2,
    "tests/events/test_first_and_last.py::test_both_readers_know_what_is_cached_after_each_step": 5,
    "tests/models/config_files/test_config_forms.py::test_a_form_means_what_transformers_makes_of_it_or_is_refused": 1.9,  # noqa: E501
    "tests/models/config_files/test_identity.py::test_lengths_have_one_identity_where_the_rotary_tables_are_the_same": 1.1,  # noqa: E501
    "tests/models/one_family/test_recurrent_families.py::test_a_block_of_states_is_worth_the_attention_of_its_tokens": 2.7,  # noqa: E501
    "tests/models/one_family/test_rswa.py::test_drafts_see_what_tokens_see": 2,
    "tests/models/quantised/test_block_fp8.py::test_an_element_is_its_number_times_the_scale_of_its_block": 1.2,
    "tests/models/quantised/test_goldens.py::test_logits_and_greedy_tokens_are_those_of_the_dequantised_model": 4.5,
    "tests/models/quantised/test_goldens.py::test_weights_are_rounded_once_to_the_dtype_that_is_asked_for": 1.1,
    "tests/models/quantised/test_kept.py::test_projections_stay_as_they_are_stored_and_give_the_golden_tokens": 2,
    "tests/models/released/test_released.py::test_a_cache_is_planned": 14.3,
    "tests/models/released/test_released.py::test_a_small_one_of_it_runs": 4,
    "tests/models/states/test_state_blocks.py::test_a_hit_at_every_length_goes_on_as_hugging_face_does": 3,
    "tests/models/states/test_state_blocks.py::test_a_hit_inside_an_answer_goes_on_as_hugging_face_does": 3,
    "tests/models/states/test_state_blocks.py::test_a_named_checkpoint_is_hit_by_the_next_prompt": 3,
    "tests/models/test_families.py::test_prefill_and_decoding_are_hugging_faces": 7.9,
    "tests/models/test_families.py::test_prefix_hits_change_nothing": 16,
    "tests/pallas_kernels/gated_delta_rule/test_gated_delta_rule.py::test_chunks_end_at_checkpoints": 2,
    "tests/pallas_kernels/gated_delta_rule/test_gpu.py::test_checkpoints_are_left_on_the_way": 2,
    "tests/pallas_kernels/gated_delta_rule/test_tpu.py::test_segments_end_at_checkpoints": 3,
    "tests/pallas_kernels/kv_write/test_shared_rows.py::test_the_other_token_of_a_word_keeps_its_bits": 1.5,
    "tests/pallas_kernels/ragged_paged_attention/test_decode_step.py::test_a_planned_decode_equals_the_oracle": 2,
    "tests/pallas_kernels/ragged_paged_attention/test_kernel_gpu.py::test_what_the_kernels_cannot_do": 16,
    "tests/pallas_kernels/ragged_paged_attention/test_own_sinks.py::test_a_query_sees_its_own_sequences_prompt_and_a_window": 4,  # noqa: E501
    "tests/pallas_kernels/ragged_paged_attention/test_schedule.py::test_every_query_sees_every_page_of_its_run_once": 16,  # noqa: E501
    "tests/pallas_kernels/ring_delta_rule/test_ring_delta_rule.py::test_arrays_of_one_column_stay_in_one_memory": 4,
    "tests/pallas_kernels/ring_delta_rule/test_ring_delta_rule.py::test_decoding_equals_the_plain_op": 4,
    "tests/pallas_kernels/ring_delta_rule/test_ring_delta_rule.py::test_pages_are_written_in_place": 4,
    "tests/pallas_kernels/ring_delta_rule/test_ring_delta_rule.py::test_random_steps": 8,
    "tests/pallas_kernels/ring_delta_rule/test_tpu.py::test_arrays_of_one_column_stay_in_one_memory": 2,
    "tests/pallas_kernels/ring_delta_rule/test_tpu.py::test_equals_the_recurrence": 2,
    "tests/pallas_kernels/ring_delta_rule/test_tpu.py::test_float32_states_are_seen_exactly": 2,
    "tests/pallas_kernels/ring_scan/test_ring_scan.py::test_arrays_of_one_column_stay_in_one_memory": 2,
    "tests/pallas_kernels/ring_scan/test_ring_scan.py::test_decoding_gives_what_the_plain_op_gives": 6,
    "tests/pallas_kernels/ring_scan/test_ring_scan.py::test_pages_are_written_in_place": 2,
    "tests/pallas_kernels/ring_scan/test_ring_scan.py::test_random_steps": 8,
    "tests/pallas_kernels/ring_scan/test_ring_scan.py::test_without_skip_and_bias": 2,
    "tests/pallas_kernels/ring_scan/test_tpu_scan.py::test_equals_the_attention": 5,
    "tests/pallas_kernels/sparse_mla_attention/test_kernel_gpu.py::test_pieces_have_every_row_once": 12,
    "tests/pallas_kernels/ssm_update/test_gpu_conv.py::test_checkpoints_are_left_on_the_way": 2,
    "tests/pallas_kernels/ssm_update/test_tpu_scan.py::test_segments_end_at_checkpoints": 3,
    "tests/pallas_kernels/test_checkpoints.py::test_checkpoints_are_left_on_the_way": 18,
    "tests/pallas_kernels/test_checkpoints.py::test_columns_without_a_checkpoint_change_nothing": 9,
    "tests/pallas_kernels/test_checkpoints.py::test_every_length_equals_two_steps": 9,
    "tests/pallas_kernels/test_checkpoints.py::test_the_state_of_a_neighbouring_token_is_noticed": 9,
    "tests/pallas_kernels/test_flags.py::test_an_op_computes_the_same": 1980,
    "tests/pallas_kernels/test_flags.py::test_an_op_is_the_same_program": 1007.3,
    "tests/pallas_kernels/test_gpu_in_slabs.py::test_a_kernel_gives_the_same_in_slabs": 11.1,
    "tests/pallas_kernels/test_in_slabs.py::test_an_op_gives_the_same_in_slabs": 13.6,
    "tests/pallas_kernels/test_key_share.py::test_merged_parts_are_attention_over_all_tokens": 3,
    "tests/pallas_kernels/test_laws.py::test_agrees_with_the_oracle": 2.4,
    "tests/pallas_kernels/test_laws.py::test_donated_pages_are_written_in_place": 4.5,
    "tests/pallas_kernels/test_laws.py::test_needs_no_jit": 7,
    "tests/pallas_kernels/test_one_token.py::test_one_token_of_any_name": 4.3,
    "tests/pallas_kernels/test_slab_pages.py::test_pages_are_written_and_read_as_in_arrays_of_their_own": 14,
    "tests/pallas_kernels/test_slab_pages.py::test_places_in_pages_are_written_and_read_as_in_arrays_of_their_own": 6.5,
    "tests/pallas_kernels/test_toy_op.py::test_it_is_held_to_the_laws": 2,
    "tests/pallas_kernels/test_tpu_decode_step.py::test_a_planned_decode_equals_the_oracle": 2,
    "tests/pallas_kernels/test_tpu_decode_step.py::test_a_planned_decode_is_one_launch": 2,
    "tests/pallas_kernels/test_tpu_in_slabs.py::test_an_op_gives_the_same_in_slabs": 13,
    "tests/pallas_kernels/test_tpu_slab_refs.py::test_a_kernel_finds_every_page": 1.5,
    "tests/pallas_kernels/triton/test_lowering.py::test_attention": 1.3,
    "tests/planning/test_plan_holds.py::test_as_many_as_planned_run_in_one_memory": 2.8,
    "tests/replay/beyond/test_tiers.py::test_the_youngest_gives_way_where_prompts_come_from_a_peer": 2,
    "tests/replay/beyond/test_tiers.py::test_the_youngest_gives_way_whether_it_runs_or_loads": 4,
    "tests/replay/bounds/test_belady.py::test_no_policy_hits_more": 4.5,
    "tests/replay/bounds/test_free_exchange.py::test_agrees_with_lists": 1.7,
    "tests/replay/replicas/test_fleet_tiers.py::test_a_router_is_told_the_hits_that_follow": 1.6,
    "tests/replay/test_misses.py::test_what_the_infinite_cache_hits_besides_lacks_a_checkpoint_or_was_evicted": 1.8,
    "tests/replay/test_working_set.py::test_the_load_of_a_trace_hits_as_much_as_the_best_of_twenty_splits": 3,
    "tests/routing/test_prefix_index.py::test_hits_of_hybrids_are_the_managers": 1.7,
    "tests/tiers/scheduler/test_tier_scheduler.py::test_data_ranks_load_what_another_computed_and_nothing_else": 24,
    "tests/tiers/shared/test_redis.py::test_every_call_ends_in_time": 3,
    "tests/tiers/shared/test_shared_store.py::test_a_store_that_nobody_holds_ends_its_thread": 2,
    "tests/tiers/stores/test_damaged_files.py::test_a_changed_file_is_a_miss_or_what_was_written": 2,
    "tests/transfer/test_engines.py::test_what_one_computes_the_other_decodes": 2,
    "tests/transfer/test_entries.py::test_entries_are_what_was_written": 3,
    "tests/transfer/test_entries.py::test_latents_are_what_was_written": 2,
    "tests/transfer/test_sent_request.py::test_pages_are_those_of_the_same_tokens_written_here": 2,
}
# Whole tests that are sweeps: kernels' further laws, and engines' that others check beside them.
SWEEPS = (
    "tests/cli/test_tier_arguments.py::test_a_run_finds_what_another_put_into_a_shared_folder",
    "tests/device/layers/test_step_cache.py::test_layers_of_one_table_may_differ_in_heads",
    "tests/device/layers/test_wanted_rows.py::test_logits_and_pages_of_a_model_are_those_of_one_that_asks_for_all",
    "tests/device/steps/test_drafts.py::test_buckets_without_drafts_are_the_programs_that_they_were",
    "tests/engine/drafts/test_draft_model.py::test_no_shape_is_new_after_warm_up",
    "tests/engine/drafts/test_speculation_engine.py::test_every_row_of_logits_is_treated_as_its_place_asks",
    "tests/engine/drafts/test_speculation_engine.py::test_text_comes_in_order_and_ends_at_stop_strings",
    "tests/engine/front/test_async_llm_engine.py::test_callers_wait_while_there_is_no_room_and_the_urgent_come_first",
    "tests/engine/front/test_engine_weights.py::test_tokens_with_a_disk_are_those_without_for_any_updates_and_restarts",
    "tests/engine/front/test_greedy.py::test_a_pool_of_a_few_blocks",
    "tests/engine/mesh/test_mesh_axes.py::test_two_processes_with_tiers_give_the_tokens_of_one",
    "tests/engine/requests/test_chat.py::test_the_command_line_takes_chats",
    "tests/engine/requests/test_chat.py::test_the_second_chat_hits_what_both_have",
    "tests/models/one_family/test_rswa.py::test_prompts_in_chunks_and_hits_of_prompts_and_answers",
    "tests/models/quantised/test_kept.py::test_kept_projections_are_split_over_devices",
    "tests/models/test_families_speculation.py::test_drafts_that_turn_wrong_change_no_token",
    "tests/models/test_load.py::test_an_engine_rotates_for_its_own_length_whatever_the_model_was_loaded_for",
    "tests/pallas_kernels/indexer_topk/test_kernel_tpu.py::test_items_may_have_more_blocks_than_buffers",
    "tests/pallas_kernels/mla_paged_attention/test_gpu_few_queries.py::test_pieces_of_a_sequence_name_it_whatever_tile_they_are_of",
    "tests/pallas_kernels/mla_paged_attention/test_kernel_gpu.py::test_the_op_writes_new_latents_and_attends",
    "tests/pallas_kernels/mla_paged_attention/test_kernel_tpu.py::test_queries_before_position_0_see_nothing",
    "tests/pallas_kernels/mla_paged_attention/test_kernel_tpu.py::test_random_steps",
    "tests/pallas_kernels/mla_paged_attention/test_kernel_tpu.py::test_results_overwritten_on_their_way_out_are_found",
    "tests/pallas_kernels/mla_paged_attention/test_kernel_tpu.py::test_the_op_writes_new_states_and_attends",
    "tests/pallas_kernels/mla_paged_attention/test_mla_paged_attention.py::test_chunked_prefill_and_decode_equal_one_prefill",
    "tests/pallas_kernels/mla_paged_attention/test_mla_paged_attention.py::test_new_kv_is_what_latent_write_writes",
    "tests/pallas_kernels/ragged_paged_attention/test_compiled.py::test_sharded_heads_agree_with_one_device",
    "tests/pallas_kernels/ragged_paged_attention/test_gpu_few_queries.py::test_a_step_of_few_queries_equals_the_oracle",
    "tests/pallas_kernels/ragged_paged_attention/test_gpu_few_queries.py::test_few_queries_among_longer_sequences_equal_the_oracle",
    "tests/pallas_kernels/ragged_paged_attention/test_gpu_schedule.py::test_a_mixed_step_with_a_plan_equals_the_oracle",
    "tests/pallas_kernels/ragged_paged_attention/test_kernel_gpu.py::test_a_nan_that_is_seen_comes_out",
    "tests/pallas_kernels/ragged_paged_attention/test_kernel_gpu.py::test_a_scale_of_keys_may_be_negative",
    "tests/pallas_kernels/ragged_paged_attention/test_kernel_gpu.py::test_cross_attention_may_have_more_queries_than_keys",
    "tests/pallas_kernels/ragged_paged_attention/test_kernel_gpu.py::test_the_op_writes_new_kv_and_attends",
    "tests/pallas_kernels/ragged_paged_attention/test_kernel_tpu.py::test_a_sink_without_bound_is_as_in_the_reference",
    "tests/pallas_kernels/ragged_paged_attention/test_kernel_tpu.py::test_blocks_of_the_default_size",
    "tests/pallas_kernels/ragged_paged_attention/test_kernel_tpu.py::test_cross_attention_may_have_more_queries_than_keys",
    "tests/pallas_kernels/ragged_paged_attention/test_kernel_tpu.py::test_float8_pages_may_be_products_operands",
    "tests/pallas_kernels/ragged_paged_attention/test_kernel_tpu.py::test_order_of_pages_does_not_matter",
    "tests/pallas_kernels/ragged_paged_attention/test_kernel_tpu.py::test_the_op_writes_new_kv_and_attends",
    "tests/pallas_kernels/ragged_paged_attention/test_laws.py::test_chunked_prefill_equals_one_prefill",
    "tests/pallas_kernels/ragged_paged_attention/test_laws.py::test_heads_that_share_keys_do_not_matter",
    "tests/pallas_kernels/ragged_paged_attention/test_own_sinks.py::test_equal_numbers_give_the_bits_of_a_number_for_all",
    "tests/pallas_kernels/ragged_paged_attention/test_shared_rows.py::test_new_kv_fills_the_other_halves_of_words",
    "tests/pallas_kernels/ragged_paged_attention/test_tpu_fused_write.py::test_a_block_that_starts_too_early_is_found",
    "tests/pallas_kernels/ragged_paged_attention/test_tpu_fused_write.py::test_blocks_start_early_up_to_one_with_a_written_page",
    "tests/pallas_kernels/ragged_paged_attention/test_tpu_ring.py::test_sequences_may_follow_each_other_in_any_order",
    "tests/pallas_kernels/ragged_paged_attention/test_tpu_ring.py::test_tiles_may_follow_each_other_in_any_order",
    "tests/pallas_kernels/ragged_paged_attention/test_xla_attention.py::test_equal_steps_give_equal_bits_and_nan_stays_in_its_sequence",
    "tests/pallas_kernels/ragged_paged_attention/test_xla_attention.py::test_sequences_of_several_queries_decode_together",
    "tests/pallas_kernels/ring_delta_rule/test_tpu.py::test_arrays_of_one_column_stay_in_one_memory",
    "tests/pallas_kernels/ring_scan/test_tpu_scan.py::test_one_column_stays_in_one_memory",
    "tests/pallas_kernels/sparse_mla_attention/test_kernel_gpu.py::test_an_empty_step",
    "tests/pallas_kernels/sparse_mla_attention/test_kernel_gpu.py::test_the_op_writes_new_latents_and_attends",
    "tests/pallas_kernels/sparse_mla_attention/test_kernel_tpu.py::test_more_picks_than_a_part",
    "tests/pallas_kernels/sparse_mla_attention/test_kernel_tpu.py::test_sinks_of_any_size",
    "tests/pallas_kernels/sparse_mla_attention/test_kernel_tpu.py::test_states_between_passes_take_few_bytes",
    "tests/pallas_kernels/sparse_mla_attention/test_kernel_tpu.py::test_the_op_writes_new_latents_and_attends",
    "tests/pallas_kernels/ssm_update/test_tpu_scan.py::test_segments_end_at_checkpoints",
    "tests/pallas_kernels/ssm_update/test_xla_scan.py::test_tiles_end_at_checkpoints",
    "tests/pallas_kernels/test_key_share.py::test_the_tpu_kernel_attends_over_the_latents_of_a_rank",
    "tests/pallas_kernels/test_tuned.py::test_an_explicit_tuning_goes_first",
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
    kept |= dict.fromkeys(SWEEPS, 0)
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

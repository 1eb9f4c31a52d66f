"""What only `pytest --full` runs, and what a loop takes of its cases in the short run.

The short run keeps one real case of everything: of every layer, schedule, dispatcher, table of
getters, checkpoint path and example. What is left to --full are further cuts of the same property,
larger worlds of an enumeration, more cycles, and what takes minutes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TypeVar

import pytest

LEFT_OUT = pytest.StashKey[int]()
"""How many of the tests that were asked for run only with --full."""
UNMATCHED = pytest.StashKey[list[str]]()
"""What is listed that no collected test has."""

T = TypeVar("T")

LONGEST = (
    "tests/faults/test_fault_matrix.py",
    "tests/data_parallel/test_random_models.py",
    "tests/megatron_adapter/test_releases.py",
    "tests/transfer/test_transfer_pairs.py",
    "tests/examples/test_train_gpt_survive.py",
    "tests/test_compile.py",
    "tests/examples/test_train_gpt_pipelined.py",
    "tests/engines/test_restarts.py",
    "tests/megatron_adapter/test_gpt.py",
    "tests/context_parallel/test_full_attention.py",
    "tests/engines/test_two_hosts.py",
    "tests/examples/test_train_gpt.py",
    "tests/examples/test_train_gpt_cp.py",
    "tests/observe/test_audit.py",
    "tests/examples/test_train_gpt_resume.py",
    "tests/test_no_hang.py",
    "tests/test_leaks.py",
)
"""The files that take a minute and more, which begin first; those that wait and count seconds are
apart, each beside some that compute."""

ONLY_FULL: dict[str, list[str]] = {
    "tests/checkpoint/test_background.py": [
        "test_a_rank_that_never_writes_is_named_within_the_grids_timeout"
    ],
    "tests/faults/test_soak.py": ["test_nothing_grows"],
    "tests/examples/test_refit.py": ["test_numpy_is_not_needed"],
    "tests/test_watch_between_grids.py": [
        "test_who_fails_between_two_grids_is_named_on_both[stopped-in a transfer]"
    ],
    "tests/test_lost_connections.py": [
        "test_a_start_that_lost_a_connection_is_tried_again[hit0-True]",
        "test_a_start_that_lost_a_connection_is_tried_again[hit1-False]",
        "test_a_start_that_lost_a_connection_is_tried_again[hit1-True]",
        "test_a_start_that_lost_a_connection_is_tried_again[hit2-True]",
        "test_who_died_meanwhile_is_named[False]",
    ],
    "tests/test_rebuild.py": [
        "test_a_dead_neighbour_keeps_no_connection_open",
        "test_the_store_goes_twice",
        "test_what_is_refused",
    ],
    "tests/faults/test_fault_matrix.py": ["test_the_whole_matrix"],
    "tests/observe/test_live_order.py": [
        "test_every_member_is_told_at_the_first_difference[dtypes]",
        "test_every_member_is_told_at_the_first_difference[roots]",
        "test_every_member_is_told_at_the_first_difference[operations]",
        "test_two_names_in_one_order[*]",
        "test_a_rank_that_does_not_compare_is_named",
    ],
    "tests/faults/test_config_faults.py": [
        "test_all_ranks_say_who_is_different[port]",
        "test_all_ranks_say_who_is_different[a duplicate rank]",
        "test_a_missing_rank_is_named_by_all_others",
    ],
    "tests/observe/test_planted_causes.py": ["test_every_planted_cause_is_named"],
    "tests/test_bench.py": ["test_it_runs_under_torchrun"],
    "tests/observe/test_audit.py": [
        "test_a_group_that_was_the_wrong_one_is_named_with_its_line",
        "test_a_program_on_dtensors_alone[False]",
        "test_the_command_ends_programs_and_says_what_parts",
        "test_a_program_that_fails_is_2_with_its_last_lines",
        "test_a_program_that_hangs_is_killed_with_all_its_ranks",
    ],
    "tests/observe/test_audit_dry.py": [
        "test_a_dry_rank_issues_what_a_real_one_does[tp=2,dp=2]",
        "test_some_ranks_of_1024",
        "test_a_dry_job_can_be_verified",
    ],
    "tests/observe/test_audit_bugs.py": [
        "test_a_bug_in_train_gpt_is_named[*]",
        "test_a_bug_in_a_megatron_gpt_is_named[*]",
    ],
    "tests/observe/test_audit_layouts.py": [
        "test_train_gpt_parts_nowhere[*]",
        "test_a_megatron_gpt_parts_nowhere[*]",
        "test_what_was_not_reached_is_not_compared",
    ],
    "tests/test_first_use.py": [
        "test_a_peer_that_never_talks_is_an_error_within_the_timeout[recv-*]",
        "test_a_peer_that_never_talks_is_an_error_within_the_timeout[broadcast-*]",
        "test_a_peer_that_never_talks_is_an_error_within_the_timeout[all_gather-*]",
        "test_a_peer_that_never_talks_is_an_error_within_the_timeout[send-*]",
        "test_a_peer_that_never_talks_is_an_error_within_the_timeout[any-*]",
        "test_a_peer_that_never_talks_is_an_error_within_the_timeout[barrier-*]",
    ],
    "tests/test_tune.py": [
        "test_the_search_is_small_at_any_size",
        "test_the_best_is_that_of_trying_everything[model0-16-12]",
    ],
    "tests/test_step_cost.py": [
        "test_groups_lie_as_a_real_grids_do",
    ],
    "tests/test_published.py": [
        "test_the_constants_are_those_that_the_runs_give",
    ],
    "tests/bridge/test_bridge_errors.py": [
        "test_a_rank_that_does_not_come_is_named",
        "test_who_waits_for_a_rank_that_died_is_told",
        "test_arguments_that_do_not_fit_are_errors_on_every_rank",
        "test_nothing_is_left_of_a_bridge",
        "test_several_encoders_into_one_model_in_their_own_orders",
    ],
    "tests/bridge/test_bridge_pipelines.py": [
        "test_two_pipelines_in_one_schedule_equal_one_process[zb-h1]",
        "test_two_pipelines_in_one_schedule_equal_one_process[gpipe]",
    ],
    "tests/examples/test_encoder_decoder.py": [
        "test_numpy_is_not_needed",
        "test_it_runs_by_itself",
    ],
    "tests/test_compile.py": [
        "test_compiled_layers_equal_themselves",
        "test_experts_whose_counts_break_the_graph_keep_their_gradients",
        "test_a_compiled_model_trains_like_itself[*inductor-*]",
        "test_a_compiled_model_trains_like_itself[2-1-aot_eager-True-False]",
    ],
    "tests/test_cross_talk.py": [
        "test_beside_other_groups[by_every_rank]",
        "test_beside_other_groups[by_half_the_ranks]",
    ],
    "tests/test_agreement.py": [
        "test_who_is_missing_is_said_where_those_that_look_first_are_gone[True]",
    ],
    "tests/test_suspend.py": [
        "test_layers_reducers_pipelines_and_optimizers_go_on[*pp*]",
        "test_names_that_share_a_communicator_go_together[region]",
        "test_names_that_share_a_communicator_go_together[aliases]",
        "test_a_rank_that_does_not_call_is_named[resume]",
        "test_a_rank_that_dies_in_the_middle_is_named[idle]",
        "test_a_grid_ends_while_it_is_suspended[abort]",
        "test_a_grid_ends_while_it_is_suspended[world]",
        "test_shutdown_while_it_is_suspended",
        "test_fsdp_which_keeps_the_groups_goes_on",
        "test_with_torchs_debug_wrapper_and_in_a_world_of_one",
    ],
    "tests/test_mesh_like_torch.py": [
        "test_dtensors_move_save_and_load_as_on_torchs",
    ],
    "tests/cli/test_habits.py": [
        "test_what_a_program_asks_of_warnings_comes_first",
        "test_shells_complete_commands_and_flags",
    ],
    "tests/packaging/test_distributions.py": [
        "test_the_sdist_holds_what_the_repository_has",
        "test_the_wheel_holds_the_packages_alone",
        "test_the_metadata_says_what_it_is",
        "test_an_index_shows_no_link_that_leads_nowhere",
        "test_the_wheel_works_in_an_empty_folder",
        "test_tests_run_from_the_sdist",
    ],
    "tests/cli/test_terminal.py": [
        "test_no_line_is_longer_than_the_terminal[60-*]",
        "test_no_line_is_longer_than_the_terminal[132-*]",
        "test_output_that_cannot_be_written_is_one_line",
        "test_a_closed_pipe_is_no_traceback_anywhere",
        "test_a_terminal_without_the_characters_gets_others",
        "test_on_a_real_terminal",
    ],
    "tests/viz/test_live.py": [
        "test_a_path_is_written",
    ],
    "tests/viz/test_pictures.py": [
        "test_every_rank_has_a_cell_of_its_groups_colour[512]",
    ],
    "tests/viz/test_page.py": [
        "test_a_hover_lights_up_the_ranks_of_the_plan",
        "test_search_and_the_keyboard_alone_do_all_of_it",
        "test_a_schedule_plays",
        "test_names_with_html_in_them_are_text",
        "test_four_thousand_ranks_answer_a_hover",
    ],
    "tests/test_front_page.py": [
        "test_both_sides_of_a_diff_train_alike[device_mesh]",
        "test_both_sides_of_a_diff_train_alike[megatron]",
    ],
    "tests/test_full.py": [
        "test_only_what_is_about_megatron_needs_it",
    ],
    "tests/test_device_mesh.py": [
        "test_axes_in_any_order",
        "test_ddp_beside_tensor_parallel_layers",
        "test_meshes_of_eight_ranks",
        "test_a_grids_mesh_is_unflattened_as_torchs",
        "test_fsdp1_over_copies_of_shards_beside_tp",
    ],
    "tests/test_sharding.py": [
        "test_redistribute_between_all_pairs_in_three_dims",
    ],
    "tests/data_parallel/test_right_or_refused.py": [
        "test_megatrons_fused_layers_add_to_main_grad[plain-shared]",
        "test_megatrons_fused_layers_add_to_main_grad[plain-ours]",
        "test_megatrons_fused_layers_add_to_main_grad[copies-alone]",
        "test_megatrons_fused_layers_add_to_main_grad[copies-shared]",
        "test_megatrons_fused_layers_add_to_main_grad[shard-alone]",
        "test_megatrons_fused_layers_add_to_main_grad[shard-ours]",
    ],
    "tests/test_launch_store.py": [
        "test_it_can_be_stopped_while_it_waits[nobody-*]",
        "test_it_can_be_stopped_while_it_waits[silent-sigterm]",
    ],
    "tests/docs/test_pages.py": [
        "test_python_of_the_docs_runs",
        "test_the_site_is_built_strictly_with_every_public_name",
    ],
    "tests/test_leaks.py": [
        "test_an_old_handle_that_somebody_keeps_costs_only_itself",
        "test_200_cycles_under_torchrun",
    ],
    "tests/test_no_hang.py": [
        "test_the_process_that_serves_the_store_is_never_started",
        "test_a_rank_whose_grid_covers_fewer_ranks[last]",
        "test_a_process_that_is_never_started",
        "test_a_rank_that_never_comes_although_torch_distributed_is_up",
        "test_a_rank_whose_grid_covers_fewer_ranks[first]",
        "test_a_rank_whose_grid_covers_fewer_ranks[middle]",
    ],
    "tests/test_pairing.py": [
        "test_a_trainer_meets_its_engines_one_after_the_other",
    ],
    "tests/test_plan.py": [
        "test_every_dense_spec_equals_enumeration[12]",
        "test_every_dense_spec_equals_enumeration[14]",
        "test_every_dense_spec_equals_enumeration[15]",
        "test_every_dense_spec_equals_enumeration[16]",
        "test_every_group_megatron_names_agrees_with_its_rank_generator[4-2-16-*]",
        "test_every_group_megatron_names_agrees_with_its_rank_generator[8-2-8-*]",
        "test_every_spec_with_experts_equals_enumeration[1?]",
        "test_every_spec_with_experts_equals_enumeration[6]",
        "test_every_spec_with_experts_equals_enumeration[8]",
        "test_every_spec_with_experts_equals_enumeration[9]",
    ],
    "tests/context_parallel/test_full_attention.py": [
        "test_a_compiled_model_leaves_attention_as_it_is",
        "test_a_window_of_many_keys_and_long_documents",
        "test_in_bf16_as_exact_as_on_one_rank",
        "test_in_single_precision",
        "test_keys_that_ask_for_no_gradient",
        "test_shards_attend_like_the_whole[1]",
        "test_shards_attend_like_the_whole[2]",
        "test_shards_attend_like_the_whole[3]",
        "test_shards_attend_like_the_whole[6]",
        "test_shards_attend_like_the_whole[8]",
    ],
    "tests/context_parallel/test_as_megatron.py": [
        "test_two_levels_are_megatrons_hierarchical_groups",
        "test_zigzag_is_megatrons[2]",
    ],
    "tests/context_parallel/test_ways.py": [
        "test_a_rings_memory_does_not_grow_with_its_ranks",
        "test_auto_is_what_was_chosen",
        "test_nobody_waits_for_ever_for_keys",
        "test_who_does_not_come_to_an_exchange_is_named",
        "test_torchs_ring_runs_on_a_grids_mesh[alltoall]",
    ],
    "tests/test_quality.py": [
        "test_megatron_names_table",
        "test_tools_pass[mypy --strict]",
    ],
    "tests/transfer/test_transfer_pairs.py": [
        "test_every_pair_of_cuts[*]",
        "test_every_pair_of_cuts_of_experts",
        "test_experts_go_from_any_cut_to_any_other",
        "test_optimizer_state_goes_from_any_cut_to_any_other",
    ],
    "tests/transfer/test_transfer_plan.py": [
        "test_nobody_waits_for_ever_however_they_take_turns",
        "test_ten_thousand_tensors_of_thirteen_hundred_ranks_are_a_short_table",
    ],
    "tests/transfer/test_what_users_give.py": [
        "test_a_rank_that_was_interrupted_while_planning_is_named",
    ],
    "tests/transfer/test_transfer_foreign.py": [
        "test_megatrons_slices_go_there_and_back[1]",
    ],
    "tests/transfer/test_transfer_carry.py": [
        "test_transfer_after_transfer_leaves_nothing_behind",
    ],
    "tests/transfer/test_transfer_errors.py": [
        "test_a_rank_is_waited_for_as_long_as_timeout_says",
        "test_a_rank_that_fails_in_the_middle_is_named_by_all[raised]",
    ],
    "tests/checkpoint/test_handing_over.py": [
        "test_one_that_dies_meanwhile_holds_nobody_up",
    ],
    "tests/checkpoint/test_round_trip.py": [
        "test_dtensors_that_fsdp_has_cut_again[4]",
        "test_every_number_is_where_it_belongs[{'dp': 4}]",
        "test_every_number_is_where_it_belongs[{'tp': 4}]",
    ],
    "tests/cli/test_cli.py": [
        "test_check_under_torchrun",
    ],
    "tests/engines/test_restarts.py": [
        "test_survivors_that_notice_nothing[second_node_once]",
        "test_a_static_rendezvous_keeps_the_store",
        "test_fewer_nodes",
        "test_plain_torch_comes_up_too",
        "test_survivors_that_notice_nothing[first_node_once]",
        "test_survivors_that_notice_nothing[second_node_twice]",
        "test_training_goes_on_with_its_curve",
        "test_two_nodes[loopback-both]",
        "test_two_nodes[loopback-first_node_once]",
        "test_two_nodes[loopback-first_node_twice]",
        "test_two_nodes[loopback-none]",
        "test_two_nodes[loopback-one_after_the_other]",
        "test_two_nodes[loopback-second_node_twice]",
        "test_two_nodes[namespaces-*]",
    ],
    "tests/engines/test_torchrun_failures.py": [
        "test_two_restarts_of_eight_ranks",
        "test_a_host_of_two_ranks_is_gone",
        "test_what_does_not_end_a_process_needs_no_restart",
        "test_who_fails_again_is_restarted",
    ],
    "tests/engines/test_one_voice.py": [
        "test_a_stop_of_plain_processes_is_one_line",
        "test_sizes_that_do_not_fit_under_torchrun",
    ],
    "tests/engines/test_two_hosts.py": [
        "test_a_host_that_cannot_be_reached",
        "test_a_slow_wire_that_loses_packets",
    ],
    "tests/engines/test_ray.py": [
        "test_a_killed_worker_and_the_job_goes_on",
        "test_a_killed_worker_and_the_others_go_on",
        "test_a_stop_is_one_line",
        "test_what_is_wrong_is_said_before_anything_starts[flag]",
        "test_what_is_wrong_is_said_before_anything_starts[no_ray]",
        "test_what_is_wrong_is_said_before_anything_starts[workers]",
    ],
    "tests/engines/test_slurm.py": [
        "test_a_killed_process_and_the_job_goes_on",
        "test_stops_are_one_line",
        "test_survivors_go_on",
        "test_the_batch_file_trains",
        "test_what_all_find_wrong_is_said_by_rank_0",
    ],
    "tests/examples/test_clients.py": [
        "test_losses_are_those_without_commgrid[accelerate --dp-shard 4]",
        "test_losses_are_those_without_commgrid[deepspeed *]",
        "test_losses_are_those_without_commgrid[lightning *]",
        "test_losses_are_those_without_commgrid[torchtitan *]",
    ],
    "tests/examples/test_fsdp_hsdp.py": [
        "test_it_runs_by_itself",
        "test_same_curve_as_one_process[8]",
    ],
    "tests/examples/test_tutorial.py": [
        "test_data_by_global_rank_is_seen_in_the_loss_alone",
        "test_every_step_has_the_losses_of_the_first[8]",
        "test_what_goes_wrong_says_what_the_page_says",
        "test_without_a_launcher",
    ],
    "tests/examples/test_torch_pipelining.py": [
        "test_torchs_schedules_on_our_groups[2-1]",
        "test_torchs_schedules_on_our_groups[4-1]",
    ],
    "tests/examples/test_train_gpt.py": [
        "test_two_jobs_on_ranks_of_one_world",
        "test_bf16_falls_as_fp32_does",
        "test_an_error_is_one_line_and_a_code",
        "test_bare_python_is_a_world_of_one",
        "test_same_curve_however_it_is_cut[fp32]",
        "test_same_curve_on_eight_ranks[fp64]",
    ],
    "tests/examples/test_megatron_gpt.py": [
        "test_under_torchrun",
    ],
    "tests/examples/test_train_gpt_cp.py": [
        "test_a_pack_has_the_loss_of_its_documents",
        "test_a_run_goes_on_with_another_cp",
        "test_evaluation_and_sample_do_not_depend_on_cp",
        "test_packed_alone_as_with_masks",
        "test_same_curve_however_sequences_are_shared[4]",
        "test_same_curve_however_sequences_are_shared[6]",
        "test_same_curve_however_sequences_are_shared[8]",
    ],
    "tests/examples/test_train_gpt_evaluation.py": [
        "test_the_same_on_any_grid[2]",
        "test_the_same_on_any_grid[8]",
        "test_evaluation_looks_at_other_text_and_changes_nothing",
        "test_a_falling_rate_goes_on_on_another_grid",
    ],
    "tests/examples/test_train_gpt_log.py": [
        "test_a_stop_is_one_line[*]",
        "test_a_stop_under_torchrun_is_one_line",
        "test_parameters_of_a_rank_are_said",
        "test_the_first_lines_are_not_about_numpy",
        "test_what_cannot_be_written_is_said_at_the_start_by_one_rank[--save]",
        "test_what_cannot_be_written_is_said_at_the_start_by_one_rank[--tensorboard]",
    ],
    "tests/examples/test_train_gpt_experts.py": [
        "test_same_curve_however_experts_are_shared[4]",
        "test_same_curve_however_experts_are_shared[8]",
    ],
    "tests/examples/test_train_gpt_fsdp.py": [
        "test_same_curve_as_one_process[2]",
        "test_same_curve_as_one_process[8]",
    ],
    "tests/examples/test_train_gpt_pipelined.py": [
        "test_numpy_is_not_needed",
        "test_same_curve[1-*]",
        "test_same_curve[2-1-2]",
        "test_same_curve[2-2-*]",
        "test_same_curve[4-*]",
    ],
    "tests/examples/test_train_gpt_resume.py": [
        "test_experts_on_other_grids",
        "test_saved_by_fsdp_and_by_one_process",
        "test_saved_on_2_2_2_and_resumed_on_any_grid[tied]",
    ],
    "tests/examples/test_train_gpt_switch.py": [
        "test_a_resumed_job_is_on_the_grid_of_its_step",
    ],
    "tests/expert/test_layer.py": [
        "test_as_a_loop_over_experts[1]",
        "test_as_a_loop_over_experts[2]",
        "test_as_a_loop_over_experts[8]",
        "test_experts_on_more_ranks_than_eight",
    ],
    "tests/expert/test_megatron_moe.py": [
        "test_as_megatrons_layer[1]",
    ],
    "tests/megatron_adapter/test_functions.py": [
        "test_every_function_on_every_rank[8]",
        "test_every_function_on_every_rank_of_a_large_world[16-*]",
        "test_every_function_on_every_rank_of_a_large_world[64-0]",
        "test_every_function_on_every_rank_of_a_large_world[64-1]",
        "test_every_function_on_every_rank_of_a_large_world[64-3]",
    ],
    "tests/megatron_adapter/test_gpt.py": [
        "test_losses_are_the_same_to_the_last_bit[--experts 4 --ep 2 --tp 2 *]",
        "test_losses_are_the_same_to_the_last_bit[--tp 2 --pp 2]",
        "test_losses_are_the_same_to_the_last_bit[--tp 2 --sequence-parallel]",
    ],
    "tests/megatron_adapter/test_departures.py": [
        "test_megatron_is_mistaken_and_the_adapter_is_not[0.15-*]",
        "test_megatron_is_mistaken_and_the_adapter_is_not[0.18-*]",
        "test_megatron_is_mistaken_and_the_adapter_is_not[0.19-*]",
    ],
    "tests/megatron_adapter/test_lone_grid.py": [
        "test_a_release_that_is_not_known_is_taken_for_none",
        "test_a_part_of_the_world",
    ],
    "tests/megatron_adapter/test_modules.py": [
        "test_on_the_adapters_grids_as_on_megatrons[bridge]",
        "test_on_the_adapters_grids_as_on_megatrons[mimo]",
        "test_on_the_adapters_grids_as_on_megatrons[reshard]",
        "test_on_the_adapters_grids_as_on_megatrons[schedule]",
    ],
    "tests/megatron_adapter/test_releases.py": [
        "test_every_function_on_every_rank[0.15.3-*]",
        "test_every_function_on_every_rank[0.16.1-*]",
        "test_every_function_on_every_rank[0.17.1-*]",
        "test_every_function_on_every_rank[0.18.2-*]",
        "test_every_function_on_every_rank[0.19.2-8]",
        "test_every_function_on_every_rank[0.20.0-*]",
        "test_every_function_on_every_rank_of_a_large_world",
        "test_hyper_comm_grids_enumerate_as_megatrons",
        "test_losses_are_the_same_to_the_last_bit",
        "test_the_table_is_what_the_release_has[0.15.3]",
        "test_the_table_is_what_the_release_has[0.16.1]",
        "test_the_table_is_what_the_release_has[0.17.1]",
        "test_the_table_is_what_the_release_has[0.18.2]",
        "test_the_table_is_what_the_release_has[0.20.0]",
        "test_what_an_older_release_has_no_variables_for",
    ],
    "tests/megatron_adapter/test_starting.py": [
        "test_one_line_is_added",
    ],
    "tests/pipeline/test_failures.py": [
        "test_a_stage_raises[0-*]",
        "test_a_stage_raises[3-*]",
    ],
    "tests/tensor_parallel/test_initial_weights.py": [
        "test_experts_draw_one_weight_on_any_grid[False-normal]",
        "test_experts_draw_one_weight_on_any_grid[False-orthogonal]",
        "test_experts_draw_one_weight_on_any_grid[True-default]",
        "test_experts_draw_one_weight_on_any_grid[True-normal]",
    ],
    "tests/tensor_parallel/test_slices.py": [
        "test_any_box_of_any_shape[*-dtype1]",
        "test_any_box_of_any_shape[*-dtype2]",
        "test_any_box_of_any_shape[*-dtype3]",
    ],
    "tests/tensor_parallel/test_linear.py": [
        "test_torch_compile_of_a_whole_block",
        "test_a_block_equals_the_unsharded_one[8]",
    ],
    "tests/tensor_parallel/test_vocabulary.py": [
        "test_cross_entropy_equals_the_unsharded_one[8]",
        "test_embedding_and_head_equal_the_unsharded_ones[8]",
    ],
}
"""Tests by file: of a name without [ ] all cases; in [ ], `*` is any text and `?` one character."""


def full() -> bool:
    """Whether this is `pytest --full`; also in the processes that tests start."""
    return os.environ.get("COMMGRID_TESTS") == "full"


def some(cases: Sequence[T], count: int) -> list[T]:
    """All cases in the full run; in the short one as many, evenly, with the first and the last.

    For example `some(range(7), 3)` is [0, 3, 6] in the short run.
    """
    if full() or count >= len(cases):
        return list(cases)
    return [cases[i * (len(cases) - 1) // max(count - 1, 1)] for i in range(count)]


def patterns() -> dict[str, re.Pattern[str]]:
    """The ids of ONLY_FULL, and what matches the tests that each means."""
    listed = [f"{file}::{name}" for file, names in ONLY_FULL.items() for name in names]
    return {one: _pattern(one) for one in listed}


def _pattern(listed: str) -> re.Pattern[str]:
    name, bracket, case = listed.partition("[")
    if not bracket:
        return re.compile(re.escape(name) + r"(\[.*\])?")
    case = re.escape(case.removesuffix("]")).replace(r"\*", ".*").replace(r"\?", ".")
    return re.compile(rf"{re.escape(name)}\[{case}\]")

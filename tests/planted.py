"""Planted faults: mistakes that the tests of each room must catch, for `tests.mutants`.

A person who rewrites the code could make each of them: a wrong group, a missing sum, a swapped
order, a dropped wait, an offset by one, a stale value, a lost error. When code moves, `file`, `old`
and `new` move with it; the fault stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath


@dataclass(frozen=True)
class Mutant:
    """A fault in one file.

    Args:
        name: says the fault.
        file: from the root of the repository.
        old: the text that is replaced; it stands exactly once in the file.
        new: the text that is planted.
        tests: files or node ids, of which one test at least must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def room(self) -> str:
        """The folder of the file, or the module beside the folders."""
        package, room, *_ = PurePath(self.file).with_suffix("").parts
        return room if package == "commgrid" else package


MUTANTS = (
    # -- audit -----------------------------------------------------------------------------
    Mutant(
        "every box of an audited tensor lies at its beginning",
        "commgrid/audit/records.py",
        "slice(b, b + n) for b, n",
        "slice(0, n) for b, n",
        (
            "tests/audit/test_audit.py::test_boxes_make_a_full_tensor_and_copies_that_differ_are_named",
        ),
    ),
    # -- bridge ----------------------------------------------------------------------------
    Mutant(
        "parts of a gradient overwrite each other",
        "commgrid/bridge/plan.py",
        "adds=part > 0",
        "adds=False",
        ("tests/bridge/test_bridge.py",),
    ),
    Mutant(
        "the first copy sends to every receiver",
        "commgrid/bridge/plan.py",
        "copies[number % len(copies)]",
        "copies[0]",
        ("tests/bridge/test_bridge_plan.py",),
    ),
    # -- call_analysis ---------------------------------------------------------------------
    Mutant(
        "a rank one call behind counts as there",
        "commgrid/call_analysis/event.py",
        "if self.issued.get((event.channel, part), 0) <= event.turn",
        "if self.issued.get((event.channel, part), 0) < event.turn",
        (
            "tests/call_analysis/test_planted_causes.py",
            "tests/call_analysis/test_diagnosis.py",
        ),
    ),
    Mutant(
        "a circle of some threads is a deadlock",
        "commgrid/call_analysis/wait_cycle.py",
        "return rank in held and standings.threads(rank, group) <= held[rank]",
        "return rank in held",
        ("tests/call_analysis/test_standing.py",),
    ),
    Mutant(
        "a value that was not recorded differs from others",
        "commgrid/call_analysis/mismatch.py",
        "if here != there and _is_known(name, here) and _is_known(name, there):",
        "if here != there:",
        ("tests/call_analysis/test_mismatch.py",),
    ),
    Mutant(
        "calls that differ are taken as one",
        "commgrid/call_analysis/rules.py",
        "if event.begun == len(event.needs) and is_alike(event):",
        "if event.begun == len(event.needs):",
        ("tests/call_analysis/test_rules.py::test_a_known_bad_program_has_the_shortest_reason",),
    ),
    Mutant(
        "the last rank is charged with the time since the first",
        "commgrid/call_analysis/straggler.py",
        "others = [calls[rank].began for rank in ranks[-2:-1]]",
        "others = [calls[rank].began for rank in ranks[:1]]",
        ("tests/call_analysis/test_straggler.py",),
    ),
    # -- call_records ----------------------------------------------------------------------
    Mutant(
        "traces of two jobs are read as one",
        "commgrid/call_records/files.py",
        "    _check_one_job(folder, traces)\n",
        "",
        ("tests/call_records/test_files.py::test_traces_of_two_jobs_are_refused",),
    ),
    # -- checkpoint ------------------------------------------------------------------------
    Mutant(
        "an error of a save in the background is lost",
        "commgrid/checkpoint/background.py",
        "        if self._error is not None:\n            raise self._error\n",
        "",
        (
            "tests/checkpoint/test_background.py::test_a_full_disk_is_told_on_all_ranks_at_the_next_call",
        ),
    ),
    Mutant(
        "one checkpoint more than asked is kept",
        "commgrid/checkpoint/folder.py",
        "if kept < keep:",
        "if kept <= keep:",
        ("tests/checkpoint/test_odd_models.py::test_links_and_earlier_steps",),
    ),
    # -- cli -------------------------------------------------------------------------------
    Mutant(
        "a node has one device",
        "commgrid/cli/grid_options.py",
        "args.world_size = args.nodes * cluster.per_node",
        "args.world_size = args.nodes",
        ("tests/cli/test_cluster_flags.py",),
    ),
    # -- collectives -----------------------------------------------------------------------
    Mutant(
        "the gradient of an all-gather is sliced, not summed",
        "commgrid/collectives/pairs.py",
        "return _apply(tensor, _gather, _reduce_scatter, group, grid, dim, sizes)",
        "return _apply(tensor, _gather, _slice, group, grid, dim, sizes)",
        ("tests/collectives/test_collectives.py",),
    ),
    Mutant(
        "forward and backward of copy_to_group are swapped",
        "commgrid/collectives/pairs.py",
        "return _apply(tensor, _same, _sum, group, grid)",
        "return _apply(tensor, _sum, _same, group, grid)",
        ("tests/collectives/test_collectives.py",),
    ),
    Mutant(
        "an uneven slice begins after itself",
        "commgrid/collectives/pairs.py",
        "return tensor.narrow(dim, sum(each[:rank]), each[rank]).contiguous()",
        "return tensor.narrow(dim, sum(each[: rank + 1]) - each[0], each[rank]).contiguous()",
        ("tests/collectives/test_collectives.py::test_uneven_slices_lie_where_their_sizes_say",),
    ),
    Mutant(
        "a collective under way is not waited for",
        "commgrid/collectives/asynchronous.py",
        "            wait_unless_broken(self.work, self.group)\n",
        "            pass\n",
        ("tests/collectives/test_collectives.py",),
    ),
    # -- context_parallel ------------------------------------------------------------------
    Mutant(
        "gradients of the last ring step are lost",
        "commgrid/context_parallel/ring.py",
        "            _give(returning.wait(), steps[-1].send, dk, dv)\n",
        "            returning.wait()\n",
        ("tests/context_parallel/test_full_attention.py::test_shards_attend_like_the_whole[4]",),
    ),
    Mutant(
        "partial outputs are joined with their weights swapped",
        "commgrid/context_parallel/online_softmax.py",
        "own.mul_((own_lse - base).exp_().unsqueeze(-1))",
        "own.mul_((lse - base).exp_().unsqueeze(-1))",
        ("tests/context_parallel/test_full_attention.py::test_shards_attend_like_the_whole[4]",),
    ),
    Mutant(
        "heads go back to positions in the order they came in",
        "commgrid/context_parallel/heads.py",
        "rows = take_runs(x.permute(2, 0, 1, 3), sorting_runs([levels.order]))",
        "rows = take_runs(x.permute(2, 0, 1, 3), levels.order)",
        ("tests/context_parallel/test_full_attention.py::test_shards_attend_like_the_whole[4]",),
    ),
    Mutant(
        "a ring across nodes takes the rank's place inside",
        "commgrid/context_parallel/heads.py",
        "ring_steps(across.ranges, across.documents, rank // inner, mask)",
        "ring_steps(across.ranges, across.documents, rank % inner, mask)",
        ("tests/context_parallel/test_full_attention.py::test_shards_attend_like_the_whole[4]",),
    ),
    Mutant(
        "an all-gather starts the messages of two steps",
        "commgrid/context_parallel/parallel_attention.py",
        'ahead = members.size() if way == "allgather" else 1',
        'ahead = 2 if way == "allgather" else 1',
        ("tests/context_parallel/test_ways.py",),
    ),
    # -- cost_model ------------------------------------------------------------------------
    Mutant(
        "an all-reduce costs one pass of the ring",
        "commgrid/cost_model/collective_form.py",
        "return 2 * _ring_pass(size, spread, levels)",
        "return _ring_pass(size, spread, levels)",
        ("tests/cost_model/test_collective.py",),
    ),
    # -- data_parallel ---------------------------------------------------------------------
    Mutant(
        "a step begins with the gradient of the step before",
        "commgrid/data_parallel/slot.py",
        "            if is_used or isinstance(gradient, KeptGradient):\n"
        "                parameter.grad = None\n",
        "",
        ("tests/data_parallel/test_step_states.py::test_two_optimizers_share_a_model",),
    ),
    Mutant(
        "steps are not compared after the first ones",
        "commgrid/data_parallel/step_comparison.py",
        "self._step < _FIRST_STEPS or self._step % _EVERY == 0",
        "self._step < _FIRST_STEPS",
        (
            "tests/data_parallel/test_step_comparison.py::test_inputs_that_begin_to_differ_later_are_refused",
        ),
    ),
    Mutant(
        "stages are not compared",
        "commgrid/data_parallel/groups.py",
        'self.stages = next(iter(self.along(["pp"])), None) if many else None',
        "self.stages = None if many else None",
        (
            "tests/data_parallel/test_step_comparison.py::test_a_count_on_the_last_stage_alone_is_refused",
        ),
    ),
    Mutant(
        "slices that were scaled to one norm pass",
        "commgrid/data_parallel/scaling.py",
        "is_clipped = (same & ~above).any(1)",
        "is_clipped = (same & above).any(1)",
        (
            "tests/data_parallel/test_step_comparison.py::test_torchs_clipping_of_each_group_is_refused",
        ),
    ),
    Mutant(
        "slices that were scaled to other norms are refused",
        "commgrid/data_parallel/scaling.py",
        "return first_place(apart & is_clipped)",
        "return first_place(apart)",
        (
            "tests/data_parallel/test_step_comparison.py::test_edits_of_some_rows_or_of_one_slice_are_right",
        ),
    ),
    Mutant(
        "all options of an optimizer count as equal",
        "commgrid/data_parallel/step_comparison.py",
        "    return exact_number_of(told), told",
        "    return 1.0, told",
        (
            "tests/data_parallel/test_step_comparison.py::test_other_options_of_a_tied_embedding_are_refused",
        ),
    ),
    Mutant(
        "equal gradients of biases prove a wrong mark",
        "commgrid/data_parallel/step_comparison.py",
        "(largest > 0) & is_weight)",
        "(largest > 0))",
        (
            "tests/data_parallel/test_step_comparison.py::test_equal_gradients_of_slices_of_the_sequence_are_right",
        ),
    ),
    Mutant(
        "a backward adds to the gradient of the step before",
        "commgrid/data_parallel/slot.py",
        "parameter.grad = self.view.zero_()",
        "parameter.grad = self.view",
        ("tests/data_parallel/test_gradient_in_place.py",),
    ),
    Mutant(
        "partial gradients are summed over the data axes alone",
        "commgrid/data_parallel/groups.py",
        "axis for part in (name, partial.name)",
        "axis for part in (name, name)",
        ("tests/data_parallel/test_reducer.py::test_steps_do_not_depend_on_how_they_are_cut",),
    ),
    Mutant(
        "copies on other stages are not summed",
        "commgrid/data_parallel/reduction.py",
        "adding = start_all_reduce_(bucket.gradient, sharers)",
        "adding = Pending(None, lambda: bucket.gradient, sharers)",
        ("tests/pipeline/test_runner.py::test_tied_embeddings_with_data_parallelism",),
    ),
    Mutant(
        "gradients are divided by this rank's count",
        "commgrid/data_parallel/sync_result.py",
        "        if total > 0:\n            return total, None\n",
        "        if total > 0:\n            return float(count or total), None\n",
        ("tests/data_parallel/test_reducer.py::test_average_is_right_with_uneven_microbatches",),
    ),
    Mutant(
        "the buffer of a parameter without gradient keeps the step before",
        "commgrid/data_parallel/bucket.py",
        "torch._foreach_zero_(absent)",
        "pass",
        (
            "tests/data_parallel/test_reducer.py::test_nothing_of_the_step_before_is_added_where_there_is_no_gradient",
        ),
    ),
    Mutant(
        "each rank decides about an overflow by itself",
        "commgrid/data_parallel/scaler.py",
        "        if self._whole is not None:\n"
        "            start_all_reduce_(worst, self._whole, dist.ReduceOp.MAX).wait()\n",
        "",
        (
            "tests/data_parallel/test_right_or_refused.py::test_all_ranks_skip_a_step_that_overflows_on_one",
        ),
    ),
    Mutant(
        "half-precision weights are not written back after a step",
        "commgrid/data_parallel/optimizer.py",
        "torch._foreach_copy_([p.weight for p in self._half], [p.master for p in self._half])",
        "pass",
        (
            "tests/data_parallel/test_sharded_optimizer.py::test_half_precision_weights_follow_their_fp32_copies",
        ),
    ),
    Mutant(
        "loading weights alone leaves the optimizer's copies",
        "commgrid/data_parallel/optimizer.py",
        "            if part.parameter._version != part.version:\n",
        "            if part.parameter._version < part.version:\n",
        ("tests/checkpoint/test_round_trip.py::test_weights_alone_renew_the_optimizers_copies",),
    ),
    # -- equality --------------------------------------------------------------------------
    Mutant(
        "only the first rank raises what a comparison finds",
        "commgrid/equality/comparison.py",
        "wrong = wrong or GridMismatchError(next(filter(None, said)))",
        "wrong = wrong if group.rank() else GridMismatchError(next(filter(None, said)))",
        (
            "tests/data_parallel/test_step_comparison.py::test_a_count_on_the_last_stage_alone_is_refused",
            "tests/context_parallel/test_batches_agree.py::test_it_is_refused_on_all_ranks",
        ),
    ),
    Mutant(
        "a batch that one rank shards alone is taken for the next of the others",
        "commgrid/equality/inputs.py",
        "            self._not_compared.add(group)\n",
        "            pass\n",
        ("tests/context_parallel/test_batches_agree.py",),
    ),
    Mutant(
        "blocks that changed places have one digest",
        "commgrid/equality/digest.py",
        "total = total * _ODD + each",
        "total = total + each",
        ("tests/test_replicas.py",),
    ),
    Mutant(
        "the first tensor is named, whichever differs",
        "commgrid/equality/comparison.py",
        "odd = (largest != -smallest).nonzero().flatten()",
        "odd = (largest != -smallest).nonzero().flatten() * 0",
        ("tests/test_replicas.py",),
    ),
    # -- expert ----------------------------------------------------------------------------
    Mutant(
        "rows are received as if by the first rank of etp",
        "commgrid/expert/dispatch.py",
        "    mine = etp.rank * n\n",
        "    mine = 0 * n\n",
        ("tests/expert/test_dispatch.py::test_combine_is_the_exact_inverse_of_dispatch",),
    ),
    Mutant(
        "rows are sorted by expert on the way back too",
        "commgrid/expert/permutation.py",
        "    return rows.index_select(0, order.inverse)\n",
        "    return rows.index_select(0, order.index)\n",
        ("tests/expert/test_dispatch.py::test_combine_is_the_exact_inverse_of_dispatch",),
    ),
    # -- grid_pairs ------------------------------------------------------------------------
    Mutant(
        "the lowest rank of a listed grid speaks for it",
        "commgrid/grid_pairs/pairing.py",
        "return int(self.spec.grid_ranks[0])",
        "return int(min(self.spec.grid_ranks))",
        ("tests/grid_pairs/test_pairing.py::test_what_a_card_says_comes_back",),
    ),
    # -- health ----------------------------------------------------------------------------
    Mutant(
        "a member that waits itself is named",
        "commgrid/health/late_call.py",
        "waiting = self._waiting | {each",
        "waiting = self._waiting - {each",
        (
            "tests/health/test_detector.py::test_of_members_behind_the_one_that_waits_itself_is_not_named",
        ),
    ),
    Mutant(
        "a closed mailbox sends on",
        "commgrid/health/mailbox.py",
        """            if self._closed.is_set():
                return False
            connection""",
        "            connection",
        ("tests/health/test_mailbox.py::test_a_closed_mailbox_sends_nothing_and_does_not_spin",),
    ),
    # -- layout ----------------------------------------------------------------------------
    Mutant(
        "an axis of several modes weighs its digits by a sum",
        "commgrid/layout/rank_layout.py",
        "weight *= mode.size",
        "weight += mode.size",
        ("tests/layout/test_rank_layout.py",),
    ),
    # -- megatron_adapter ------------------------------------------------------------------
    Mutant(
        "what a function calls is not read",
        "megatron_adapter/module_code.py",
        "            reached |= more\n            left += more\n",
        "            reached |= more\n",
        ("tests/megatron_adapter/test_installation.py",),
    ),
    Mutant(
        "ranks of an embedding lose the order of the function that named them",
        "megatron_adapter/lifecycle.py",
        '[grid.get_ranks("pp")[i] for i in positions]',
        '[grid.get_ranks("pp")[i] for i in sorted(positions)]',
        ("tests/megatron_adapter/test_functions.py::test_every_function_on_every_rank[4]",),
    ),
    # -- parameters ------------------------------------------------------------------------
    Mutant(
        "a loss divided by its passes is not refused",
        "commgrid/parameters/loss_owner.py",
        "untold and passes > 1 and",
        "untold and passes > 9 and",
        ("tests/expert/test_loss_scale.py",),
    ),
    Mutant(
        "a second mark takes the first one's region away",
        "commgrid/parameters/marks.py",
        'region if region != "dense" else mark.region,',
        "region,",
        ("tests/data_parallel/test_reducer.py::test_a_second_mark_keeps_what_the_first_one_says",),
    ),
    # -- pipeline --------------------------------------------------------------------------
    Mutant(
        "deferred weight gradients of the last microbatches are dropped",
        "commgrid/pipeline/execution.py",
        "                weights()\n",
        "                pass\n",
        ("tests/pipeline/test_runner.py::test_losses_and_gradients_are_the_unsplit_models[2]",),
    ),
    Mutant(
        "shared parameters train without a reducer",
        "commgrid/pipeline/stage.py",
        "if self._shares and self.reducer is None:",
        "if self._shares and self.reducer is not None:",
        ("tests/pipeline/test_tied.py::test_copies_without_a_reducer_do_not_train",),
    ),
    # -- pipeline_schedules ----------------------------------------------------------------
    Mutant(
        "a stage receives from itself",
        "commgrid/pipeline_schedules/messages.py",
        "recv = Recv(stage, chunk, action.microbatch, action.stage, message)",
        "recv = Recv(stage, chunk, action.microbatch, stage, message)",
        (
            "tests/pipeline_schedules/test_schedule.py::test_every_dependency_is_met_and_every_send_matched",
            "tests/pipeline_schedules/test_schedule.py::test_the_bubble_is_the_closed_form",
        ),
    ),
    # -- planning --------------------------------------------------------------------------
    Mutant(
        "the row's options lose to those of the group it is made of",
        "commgrid/planning/group_row.py",
        "backend=self.backend or base.backend",
        "backend=base.backend or self.backend",
        ("tests/planning/test_plan.py::test_a_row_overrides_options_of_the_group_it_is_made_of",),
    ),
    Mutant(
        "dp_replicate varies faster than dp_shard",
        "commgrid/planning/region.py",
        'parts = [a for a in ("dp_shard", "dp_replicate") if',
        'parts = [a for a in ("dp_replicate", "dp_shard") if',
        ("tests/planning/test_spec.py",),
    ),
    Mutant(
        "the emptiest replicas stay after a failure",
        "commgrid/planning/survivors.py",
        "key=lambda at: (-len(rows[at]), at)",
        "key=lambda at: (len(rows[at]), at)",
        ("tests/planning/test_survivors.py",),
    ),
    # -- recording -------------------------------------------------------------------------
    Mutant(
        "calls on a new communicator are counted on from the old one",
        "commgrid/recording/recorder.py",
        "of = group.key, group.ranks",
        "of = group.name, group.ranks",
        ("tests/test_trace.py::test_a_new_grid_counts_its_calls_from_the_start",),
    ),
    # -- recovery --------------------------------------------------------------------------
    Mutant(
        "an older state in memory is taken before a newer checkpoint",
        "commgrid/recovery.py",
        "if saved and saved[0] > having[0].step:",
        "if saved and saved[0] < having[0].step:",
        ("tests/checkpoint/test_kept.py::test_a_newer_checkpoint_goes_first",),
    ),
    # -- rendezvous ------------------------------------------------------------------------
    Mutant(
        "a card that is taken stays on the board",
        "commgrid/rendezvous/grid_match.py",
        "            waiting.remove(found)\n",
        "            pass\n",
        ("tests/rendezvous/test_grid_match.py::test_all_at_once_find_one_each",),
    ),
    Mutant(
        "an answer that comes late is left at the store",
        "commgrid/rendezvous/remote_questions.py",
        "                    self._late.append((at, (yield Now())))",
        "                    pass",
        ("tests/rendezvous/test_remote_questions.py::test_every_fault_at_every_operation",),
    ),
    Mutant(
        "the last rank of a block of arrivals is not asked for",
        "commgrid/rendezvous/arrival_bitmap.py",
        "near = range(block * BLOCK, (block + 1) * BLOCK)",
        "near = range(block * BLOCK, (block + 1) * BLOCK - 1)",
        ("tests/rendezvous/test_arrival_bitmap.py::test_any_of_them_may_be_the_last",),
    ),
    Mutant(
        "a second process as one rank leaves its mark among the arrivals",
        "commgrid/rendezvous/arrival_bitmap.py",
        '        yield Add(f"{at}/{block}", -bit)\n',
        "",
        (
            "tests/rendezvous/test_arrival_bitmap.py::test_a_second_process_does_not_touch_its_neighbour",
        ),
    ),
    Mutant(
        "a rank whose document differs does not say so",
        "commgrid/rendezvous/documents.py",
        "        if stands == mine:",
        "        if stands:",
        ("tests/rendezvous/test_agreement.py::test_every_difference_is_named_once",),
    ),
    Mutant(
        "an epoch is linked to the one before it before it is announced",
        "commgrid/rendezvous/world_epoch.py",
        """        yield Put("epoch", self._token.encode())
        if before is not None:
            yield Put(f"{before}/next", self._token.encode())
""",
        """        if before is not None:
            yield Put(f"{before}/next", self._token.encode())
        yield Put("epoch", self._token.encode())
        if before is not None:
""",
        (
            "tests/rendezvous/test_starts.py::"
            "test_a_restart_starts_whatever_the_attempts_before_have_left",
        ),
    ),
    Mutant(
        "a call for members that lost to another is taken for the one that stands",
        "commgrid/rendezvous/membership.py",
        """            found = yield Cas(f"{_BASE}/{number}/call", found, mine)
""",
        """            yield Cas(f"{_BASE}/{number}/call", found, mine)
            found = mine
""",
        (
            "tests/rendezvous/test_membership.py::"
            "test_two_grids_in_one_call_each_get_their_own_decision",
        ),
    ),
    Mutant(
        "a rank that was held up opens a call of its own",
        "commgrid/rendezvous/membership.py",
        """            if call.after in past and self._me not in unpack(past[call.after]):
                # They""",
        """            if False:
                # They""",
        ("tests/rendezvous/test_membership.py::test_every_fault_at_every_operation",),
    ),
    Mutant(
        "the only absent rank is named at once",
        "commgrid/rendezvous/failure_round.py",
        "limit = min(limit, last + timeouts().settle)",
        "limit = last",
        ("tests/rendezvous/test_failure_round.py::test_of_two_ranks_the_later_one_is_not_named",),
    ),
    Mutant(
        "a rank that is elected after the deadline decides that all go on",
        "commgrid/rendezvous/round.py",
        "(yield from decide(absent, True))",
        "(yield from decide(absent, bool(absent)))",
        ("tests/rendezvous/test_starts.py::test_any_order_of_operations",),
    ),
    # -- replicas --------------------------------------------------------------------------
    Mutant(
        "copies that differ are said to be other ranks'",
        "commgrid/replicas.py",
        "who = _holders(ranks, list(numbers.values()))",
        "who = _holders(ranks[::-1], list(numbers.values()))",
        ("tests/test_replicas.py",),
    ),
    # -- resharding ------------------------------------------------------------------------
    Mutant(
        "a slice of a slice begins where the outer one does",
        "commgrid/resharding/item.py",
        "offset[dim] += group.rank * parameter.shape[dim]",
        "offset[dim] = group.rank * parameter.shape[dim]",
        ("tests/checkpoint/test_round_trip.py::test_slices_of_slices_lie_inside_them",),
    ),
    Mutant(
        "the first holder writes all copies",
        "commgrid/resharding/holders.py",
        "        loads[chosen] += amount\n",
        "",
        ("tests/resharding/test_boxes.py",),
    ),
    Mutant(
        "bytes left over after rounding have no sender",
        "commgrid/resharding/assignment.py",
        "    shares[ordered[0]] += left\n",
        "",
        ("tests/resharding/test_transfer_plan.py",),
    ),
    Mutant(
        "tensors that changed places pass for the planned ones",
        "commgrid/resharding/layouts.py",
        "return _split(now) == (forms, self.lists[number])",
        "return _split(now)[0] == forms",
        (
            "tests/resharding/test_transfer_plan.py::test_a_layout_with_other_names_in_its_places_is_another_one",
        ),
    ),
    # -- runtime ---------------------------------------------------------------------------
    Mutant(
        "the ranks that answered are compared with the plan by their number",
        "commgrid/runtime/communicator.py",
        "if ranks != communicator.ranks:",
        "if len(ranks) != len(communicator.ranks):",
        ("tests/runtime/test_grid.py::test_members_other_than_planned_are_an_error",),
    ),
    Mutant(
        "half of the ranks go on although the others may be alive",
        "commgrid/runtime/rebuild.py",
        "(len(were) // 2 + 1 if unsure else -(-len(were) // 2))",
        "-(-len(were) // 2)",
        ("tests/runtime/test_rebuild.py::test_half_go_on_only_where_the_others_cannot",),
    ),
    Mutant(
        "only the first name of a shared communicator suspends it",
        "commgrid/runtime/suspension.py",
        "if wanted & {*c.names}]",
        "if c.names[0] in wanted]",
        ("tests/runtime/test_suspension.py::test_names_that_share_a_communicator_go_together",),
    ),
    Mutant(
        "look-ups that were kept outlive the grid",
        "commgrid/runtime/named_groups.py",
        "        self._ranks.clear()\n",
        "",
        (
            "tests/runtime/test_grid.py::test_the_contract",
            "tests/runtime/test_grid.py::test_several_grids_live_side_by_side",
        ),
    ),
    Mutant(
        "a host's ranks begin at the host's number",
        "commgrid/runtime/named_failures.py",
        "for first in {rank // size * size for rank in gone}]",
        "for first in {rank // size for rank in gone}]",
        (
            "tests/torch_compat/test_peer_errors.py::test_a_host_of_which_nothing_is_heard_is_gone_as_a_whole",
        ),
    ),
    Mutant(
        "a grid that has failed is looked up as before",
        "commgrid/runtime/live_groups.py",
        "self._groups.clear()  # so that no look-up has to check",
        "pass",
        ("tests/store/test_gate.py::test_a_rank_that_never_comes_to_a_first_call",),
    ),
    # -- sharding --------------------------------------------------------------------------
    Mutant(
        "a part of a part begins where the tensor does",
        "commgrid/sharding.py",
        "spans[placement.dim] = start + begin, min(piece, size - begin)",
        "spans[placement.dim] = begin, min(piece, size - begin)",
        ("tests/test_sharding.py",),
    ),
    # -- store -----------------------------------------------------------------------------
    Mutant(
        "a closed line leaves its wait",
        "commgrid/store/key_wait.py",
        """        for wait in self._waits:
            wait.end()
        if self._reuse:""",
        "        if self._reuse:",
        ("tests/store/test_key_wait.py::test_a_closed_line_ends_its_wait",),
    ),
    Mutant(
        "members of a pair's connection are those of the whole group",
        "commgrid/store/gate.py",
        "or list(self._ranks)",
        "and list(self._ranks)",
        ("tests/store/test_gate.py::test_of_a_pair_the_other_one_is_named",),
    ),
    Mutant(
        "a gate that failed before lets later calls wait",
        "commgrid/store/gate.py",
        "            self._check()  # `end` may have run before this barrier was listed\n",
        "",
        ("tests/store/test_gate.py::test_a_failure_ends_the_wait",),
    ),
    # -- tensor_parallel -------------------------------------------------------------------
    Mutant(
        "a vocabulary slice starts at the rank, not at its first column",
        "commgrid/tensor_parallel/cross_entropy.py",
        "start = group.rank * columns",
        "start = group.rank * vocabulary // group.size",
        (
            "tests/tensor_parallel/test_vocabulary.py::test_embedding_and_head_equal_the_unsharded_ones[2]",
        ),
    ),
    Mutant(
        "a row layer's bias is not marked as partial under sequence parallelism",
        "commgrid/tensor_parallel/linear.py",
        'self.partial = ("bias",) if sequence_parallel else ()',
        "self.partial = ()",
        (
            "tests/tensor_parallel/test_linear.py::test_a_block_equals_the_unsharded_one[2]",
            "tests/tensor_parallel/test_linear.py::test_layers_copy_pickle_and_outlive_a_grid",
        ),
    ),
    Mutant(
        "a row layer's bias is added on every rank",
        "commgrid/tensor_parallel/matmul.py",
        "        y = F.linear(x, weight)\n        if sequence_dim is None:",
        "        y, bias = F.linear(x, weight, bias), None\n        if sequence_dim is None:",
        ("tests/tensor_parallel/test_linear.py::test_a_block_equals_the_unsharded_one[2]",),
    ),
    # -- torch_compat ----------------------------------------------------------------------
    Mutant(
        "a batch counts as over with its first entry",
        "commgrid/torch_compat/suspended_groups.py",
        "last = batch[-1]",
        "last = batch[0]",
        ("tests/torch_compat/test_nccl_records.py::test_a_batch_is_over_with_its_last_entry",),
    ),
    Mutant(
        "patches of torch come off in the order in which they were made",
        "commgrid/torch_compat/mesh.py",
        "for each in reversed(_REPLACED[:]):",
        "for each in _REPLACED[:]:",
        ("tests/torch_compat/test_torch_untouched.py",),
    ),
    Mutant(
        "torch's errors about a peer that is gone are errors of another kind",
        "commgrid/torch_compat/peer_errors.py",
        "return any(pattern.search(said) for pattern in _PEER_ERRORS)",
        "return False",
        ("tests/torch_compat/test_peer_errors.py",),
    ),
    # -- transfer --------------------------------------------------------------------------
    Mutant(
        "a transfer that has ended in the middle runs again",
        "commgrid/transfer/transfer.py",
        '        self._broken = f"{error} (in transfer {self._name!r}); {consequence}"\n',
        '        self._broken = ""\n',
        (
            "tests/transfer/test_transfer_errors.py::test_all_ranks_say_what_is_wrong_and_nothing_moves",
            "tests/transfer/test_transfer_errors.py::test_a_rank_that_fails_in_the_middle_is_named_by_all[raised]",
        ),
    ),
    # -- viz -------------------------------------------------------------------------------
    Mutant(
        "measured spans begin at the clock's zero",
        "commgrid/viz/schedule_picture.py",
        "spans = {a: (start - begin, end - begin)",
        "spans = {a: (start, end)",
        ("tests/viz/test_pictures.py",),
    ),
)

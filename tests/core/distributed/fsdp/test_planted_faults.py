"""Small faults planted in the engine's layout, plan, streams and caches: each turns the test red that stands beside it.

``python -m tests.core.distributed.fsdp.test_planted_faults`` prints what each fault leads to.
"""

from __future__ import annotations
import __future__

import functools
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.launch import run_ranks

_ENGINE, _TESTS = "megatron.core.distributed.fsdp", "tests.core.distributed.fsdp"


@dataclass(frozen=True)
class Fault:
    """One edit of a function's source."""

    where: str
    """Module under the engine's folder, and the function in it."""

    old: str
    """Text that the function has once."""

    new: str
    red: str
    """Module and name of the test, or of the check on two ranks, that fails."""

    @property
    def needs_ranks(self) -> bool:
        return not self.red.split(":")[1].startswith("test_")

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The fault is in force, wherever the function was imported."""
        function = _function(self.where)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"{self.where} must have {self.old!r} once; mend the table:\n{source}"
        flags = __future__.annotations.compiler_flag
        whole = compile(source.replace(self.old, self.new), function.__code__.co_filename, "exec", flags)
        original, function.__code__ = function.__code__, _code_of(whole, function.__name__)
        _clear_caches()
        try:
            yield
        finally:
            function.__code__ = original
            _clear_caches()

    def test(self) -> None:
        """Run the test beside it."""
        module, name = self.red.split(":")
        getattr(importlib.import_module(f"{_TESTS}.{module}"), name)()


def _function(where: str) -> FunctionType:
    module, path = where.split(":")
    owner: Any = importlib.import_module(f"{_ENGINE}.{module}")
    *classes, name = path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    found = inspect.getattr_static(owner, name)
    for inner in ("fget", "func", "__wrapped__"):  # of a property, a cached property, a cached function
        found = getattr(found, inner, found)
    assert isinstance(found, FunctionType), where
    return found


def _code_of(code: CodeType, name: str) -> CodeType:
    return next(const for const in code.co_consts if isinstance(const, CodeType) and const.co_name == name)


def _clear_caches() -> None:
    from megatron.core.distributed.fsdp.layout import row_groups

    row_groups._groups.cache_clear()


FAULTS = {
    # layout
    "a tensor crosses one boundary in a segment that is one too small": Fault(
        "layout.flat_layout:_least_crossed_once",
        "numel - in_front)",
        "numel - in_front - 1)",
        "layout.test_layout:test_the_least_segment_is_that_of_an_exhaustive_search",
    ),
    "a tensor crosses one boundary only in a segment that is one too large": Fault(
        "layout.flat_layout:_least_crossed_once",
        "numel - in_front)",
        "numel - in_front + 1)",
        "layout.test_layout:test_the_least_segment_is_that_of_an_exhaustive_search",
    ),
    "a tensor that would end at a boundary begins one granule later": Fault(
        "layout.flat_layout:_first_start",
        "(boundary - start) // granule",
        "(boundary - start - 1) // granule",
        "layout.test_layout:test_every_layout_keeps_the_rules",
    ),
    "neighbours in an arena count as sharing addresses": Fault(
        "layout.arena:_sharing_addresses",
        "other_offset >= offset",
        "other_offset > offset",
        "layout.test_arena:test_overlapping_names_those_who_share_addresses",
    ),
    "a range ends one tick late": Fault(
        "layout.arena:_begins",
        "sorted(begins + ends)",
        "sorted(begins + ends, key=lambda change: (change[0], -change[1]))",
        "layout.test_arena:test_ranges_that_touch_may_share",
    ),
    # plan
    "a reduction's input is free while it is read": Fault(
        "layout.plan:Recorder.end",
        "_OUTLIVES[kind]",
        "1",
        "layout.test_plan:test_a_chain_shares_two_ranges_besides_the_roots",
    ),
    "weights that are gathered ahead have no address yet": Fault(
        "layout.plan:Recorder.plan",
        "begins[r.begin]",
        "r.begin",
        "layout.test_plan:test_a_chain_shares_two_ranges_besides_the_roots",
    ),
    "the depth of prefetching is a bound": Fault(
        "layout.plan:Recorder._gather_ahead",
        "len(on_their_way) >= depth and",
        "len(on_their_way) >= depth or",
        "layout.test_plan:test_the_bytes_asked_for_go_beyond_the_depth",
    ),
    "a unit is resharded between its forward and its backward": Fault(
        "layout.plan:Plan.staying",
        "at) + 1",
        "at)",
        "runtime.test_schedule:each_gather_is_issued_before_the_previous_units_compute",
    ),
    "a use prefetches what the one before it should": Fault(
        "runtime.planner:Planner.use",
        "following = plan.ahead[cursor]",
        "following = plan.ahead[cursor - 1]",
        "runtime.test_schedule:each_gather_is_issued_before_the_previous_units_compute",
    ),
    "a departure from the plan is not noted": Fault(
        "runtime.planner:Planner._depart",
        "self.in_plan, self.staying = False, NO_UNITS",
        "pass",
        "runtime.test_order:an_order_that_changes_is_right_told_once_and_learned",
    ),
    "only version counters detect a write": Fault(
        "runtime.unsharder:Unsharder.were_written",
        "return torch.stack([group.weights.differs() for group in groups]).any()",
        "return False",
        "runtime.test_sibling_roots:a_write_by_one_rank_alone_is_seen_by_all",
    ),
    "a root that runs again continues the pass": Fault(
        "runtime.planner:Planner.enter_root",
        "(is_new and not starts_over)",
        "(not starts_over)",
        "runtime.test_sibling_roots:evaluations_alone_are_planned_as_one_pass",
    ),
    # streams
    "the release of a range is recorded on the gather stream": Fault(
        "runtime.unsharder:Unsharder.reshard",
        "self._released.record(Role.COMPUTE)",
        "self._released.record(Role.GATHER)",
        "runtime.test_schedule:nothing_races_in_steady_steps",
    ),
    "a reduction waits for itself, not for the backward that writes": Fault(
        "runtime.grad_reducer:GradReducer._launch",
        "self._written.record(Role.COMPUTE)",
        "self._written.record(Role.REDUCE)",
        "runtime.test_schedule:nothing_races_in_steady_steps",
    ),
    "the end of a backward waits for what it wrote, not for its reductions": Fault(
        "runtime.grad_reducer:GradReducer.finish",
        "self._last.wait(Edge.GRADS_REDUCED)",
        "self._written.wait(Edge.GRADS_REDUCED)",
        "runtime.test_schedule:nothing_races_in_steady_steps",
    ),
    "a gather into memory that was just allocated does not wait for compute": Fault(
        "runtime.unsharder:Unsharder._make_room",
        "self._now.wait(Edge.RANGE_RELEASED)",
        "pass",
        "runtime.test_schedule:nothing_races_in_steady_steps",
    ),
    "the input of the first unit ends the backward of the outermost one": Fault(
        "runtime.step_state:StepState.begin_outermost",
        "self.num_entered + 2",
        "self.num_entered + 1",
        "runtime.test_order:the_first_unit_is_reduced_before_the_root_goes_on",
    ),
    # caches
    "the next version of weights counts as cast already": Fault(
        "buffers.weights:Weights.follow_main",
        "note_cast(version, write_count",
        "note_cast(version + 1, write_count",
        "api.test_optimizer:bf16_model_weights_follow_their_fp32_main_weights",
    ),
    "a gradient that the user has cleared and keeps is written again": Fault(
        "buffers.gradients:Gradients._leave_what_is_kept",
        "if self.main.num_foreign_references():",
        "if False:",
        "runtime.test_public_state:a_gradient_that_the_user_keeps_stays_as_it_was",
    ),
    # gradients that no other rank shares
    "a backward overwrites the sum of the microbatches before it": Fault(
        "buffers.gradients:GradInput.acquire_main",
        "= views, True, True, holds_sum",
        "= views, True, True, [False] * len(views)",
        "buffers.test_direct_gradients:numbers_are_those_of_the_reduce_scatter_input_to_the_last_bit",
    ),
    "a missing gradient is what new memory held": Fault(
        "buffers.gradients:GradInput.copy_in",
        "if missing:",
        "if False:",
        "buffers.test_direct_gradients:numbers_are_those_of_the_reduce_scatter_input_to_the_last_bit",
    ),
    "zeros of the engine count as a gradient of an earlier microbatch": Fault(
        "buffers.gradients:Gradients._has_sum",
        "for i in self.absent:",
        "for i in ():",
        "buffers.test_direct_gradients:gradients_are_those_of_the_model_without_sharding_to_the_last_bit",
    ),
    "a failed backward leaves a part of a gradient": Fault(
        "buffers.gradients:Gradients.acquire_main",
        "set_grads(compress(self._sharded, map(operator.not_, has_sum)), repeat(None))",
        "pass",
        "buffers.test_direct_gradients:a_failed_backward_leaves_no_part_of_a_gradient",
    ),
    "a backward adds to what a failed one has written": Fault(
        "buffers.gradients:Gradients.drop_unreduced",
        "each(torch.Tensor.zero_",
        "each(torch.clone",
        "buffers.test_direct_gradients:the_rest_of_a_step_after_a_failed_backward_is_added_to_what_is_whole",
    ),
    "a backward writes the gradient that the user keeps": Fault(
        "buffers.gradients:Gradients.acquire_main",
        "self.main.views, has_sum",
        "self.input.views if self.input.is_main else self.main.views, has_sum",
        "buffers.test_direct_gradients:gradients_that_the_user_keeps_or_sets_are_the_users",
    ),
    "sums over further ranks are summed again": Fault(
        "buffers.gradients:Gradients.acquire_main",
        "for grad_sum in self.sums",
        "for grad_sum in ()",
        "strategies.test_split_models:gradients_are_summed_once_however_microbatches_are_announced",
    ),
    "a scaled gradient is not reduced": Fault(
        "buffers.gradients:Gradients.use_settings",
        "and settings.sum_divisor == 1",
        "",
        "buffers.test_direct_gradients:what_must_be_scaled_or_seen_or_summed_wider_is_reduced",
    ),
    "the plan has a range for an input that no backward writes": Fault(
        "buffers.parameter_group:FsdpParameterGroup.plans_input",
        "(self.least_memory or self.grads.is_direct)",
        "self.least_memory",
        "buffers.test_direct_gradients:no_memory_is_spent_on_reduce_scatter_inputs",
    ),
    "weights of the version before count as fresh": Fault(
        "runtime.unsharder:Unsharder.prefetch",
        "weights.freshness.version != self.state.weight_version",
        "weights.freshness.version < self.state.weight_version - 1",
        "api.test_optimizer:bf16_model_weights_follow_their_fp32_main_weights",
    ),
    # random programs
    "gradients are too large by one in a hundred thousand": Fault(
        "buffers.grad_sums:GradAccumulator.divide_by",
        "1 / divisor",
        "1.00001 / divisor",
        "test_random_programs:programs_that_amplify_rounding_are_equal",
    ),
    # whole matrices
    "a matrix is put together in another order of ranks": Fault(
        "matrices.orthogonalizer:_by_position",
        "key=lambda rank: matrix.ranges[rank]",
        "key=lambda rank: -rank",
        "flat_optimizer.test_flat_muon:gradients_are_clipped_and_products_are_as_precise_as_asked",
    ),
    "blocks of rows all have the first one's scale": Fault(
        "matrices.shared_matrix:SharedMatrix.pieces_by_block",
        "len(set(values)) == 1",
        "len(set(values)) > 0",
        "flat_optimizer.test_flat_muon:blocks_of_rows_are_matrices_of_their_own",
    ),
    "parameters without a gradient keep their place among the matrices": Fault(
        "flat_optimizer.flat_muon:FlatMuon._begin_updates",
        "and p not in self._idle",
        "and p is not None",
        "flat_optimizer.test_flat_muon:units_and_parameters_without_gradients_are_left_alone",
    ),
    "only one group of a round comes into the momentum": Fault(
        "flat_optimizer.flat_muon:FlatMuon._fill",
        "self._senders[round_number]",
        "self._senders[round_number][:1]",
        "flat_optimizer.test_flat_muon:many_rounds_are_as_one",
    ),
    "a matrix of tensor-parallel parts is divided by the norm of a part": Fault(
        "matrices.newton_schulz:NewtonSchulz._norm",
        "if split_over is None",
        "if True",
        "matrices.test_tensor_parallel_matrices:parts_that_work_together_are_as_the_whole",
    ),
    "moments of two tensors have the scale of their block": Fault(
        "flat_optimizer.moments:_pieces",
        "run.begin // BLOCK_NUMEL + run.place, (run.end - 1) // BLOCK_NUMEL + 1 + run.place",
        "run.begin // BLOCK_NUMEL, (run.end - 1) // BLOCK_NUMEL + 1",
        "flat_optimizer.test_moments:sharded_moments_are_those_of_plain_pytorch_bit_for_bit",
    ),
    "scales of moments move when a parameter has no gradient": Fault(
        "flat_optimizer.flat_runs:runs_of",
        "enumerate(sorted(spans)) if only is None or only[run.weight]",
        "enumerate(span for span in sorted(spans) if only is None or only[span.weight])",
        "flat_optimizer.test_moments:parameters_without_a_gradient_keep_their_moments",
    ),
    "moments are lost when a step count is written": Fault(
        "flat_optimizer.flat_adamw:FlatAdamW.adopt_state",
        "if STEP in given else ()",
        "if STEP not in given else ()",
        "flat_optimizer.test_moments:state_that_users_write_is_taken_over",
    ),
}


def _outcome(name: str) -> str:
    """What the test of a fault ends with; "" where it passes."""
    with FAULTS[name].planted():  # outside of try: a row that matches no source is an error of the table
        try:
            FAULTS[name].test()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def _outcomes_on_rank(names: list[str]) -> dict[str, str]:
    outcomes = {}
    for name in names:
        outcomes[name] = _outcome(name)
        dist.barrier()
    return outcomes


@functools.cache
def _outcomes_on_ranks() -> dict[str, list[str]]:
    names = [name for name, fault in FAULTS.items() if fault.needs_ranks]
    by_rank = run_ranks(2, _outcomes_on_rank, names)
    return {name: [outcomes[name] for outcomes in by_rank] for name in names}


@pytest.mark.parametrize("name", FAULTS)
def test_a_small_fault_turns_its_test_red(name: str) -> None:
    outcomes = _outcomes_on_ranks()[name] if FAULTS[name].needs_ranks else [_outcome(name)]
    assert any(outcomes), f"{FAULTS[name].red} passes with the fault in {FAULTS[name].where}"


if __name__ == "__main__":
    for fault_name in FAULTS:
        ended = _outcomes_on_ranks()[fault_name] if FAULTS[fault_name].needs_ranks else [_outcome(fault_name)]
        print(f"{fault_name}: {ended[0].strip().splitlines()[0][:120] if ended[0] else 'PASSES'}", flush=True)

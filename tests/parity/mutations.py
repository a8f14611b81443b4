"""Faults on purpose, each in force on all ranks, and the cells that they turn red.

``python -m tests.parity.mutations`` runs every fault on every probe, prints which are red, and fails where one that stands here
is not; names of faults as arguments run these alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parity.cells import CELLS
from tests.parity.comparison import differences
from tests.parity.launches import run_mutated, run_references

PROBES = {
    "fsdp": "gpt-none-optim_grads_params-m4-token",
    "hsdp": "gpt-none-hsdp-m4-mean",
    "hfsdp": "gpt-none-hfsdp-m1-token",
    "tp": "gpt-tp2-optim-m1-mean",
    "sp": "gpt-tp2+sp-optim_grads-m4-mean",
    "cp": "gpt-cp2-optim_grads_params-m1-mean",
    "pp": "gpt-pp2-optim_grads_params-m4-mean",
    "vp": "gpt-pp2+vp2-optim_grads_params-m4-token",
    "mtp": "mtp-pp2-optim-m1-mean",
    "mtp cp": "mtp-cp2-optim_grads_params-m4-token",
    "ep": "moe-ep2-optim_grads_params-m4-mean",
    "moe sp": "moe-tp2+sp-optim_grads_params-m1-token",
    "moe cp": "moe-cp2-hfsdp-m1-token",
    "moe bias": "moe-ep2-optim-m1-mean",
    "latent tp": "latent-tp2-optim_grads-m1-mean",
    "latent sp": "latent-tp2+sp-optim_grads_params-m4-token",
    "latent cp": "latent-cp2-optim_grads-m1-mean",
    "windows tp": "attention-tp2-optim_grads-m1-mean",
    "windows cp": "attention-cp2-optim_grads-m1-mean",
    "muon tp": "muon-tp2+sp-optim_grads-m4-token",
}
"""Cells that faults are tried on, by a short name."""

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutation:
    """A fault."""

    patch: Patch
    reddens: str
    """Probes that see it, separated by commas."""

    refused: tuple[str, ...] = ()
    """What the errors say that end runs with it; empty: the numbers show it."""

    @contextmanager
    def scope(self) -> Iterator[None]:
        """The fault is in force."""
        with pytest.MonkeyPatch.context() as patch:
            self.patch(patch)
            yield

    def is_seen(self, lines: list[str]) -> bool:
        """Return whether a run with it differs as it should; an error of another kind may be of a patch that is out of date."""
        if any("Traceback" in line for line in lines):
            return any(words in line for words in self.refused for line in lines)
        return bool(lines)


def _experts_are_averaged_over_their_own_ranks(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.distributed.fsdp.mesh import group_mesh

    patch.setattr(group_mesh, "count_averaged", lambda axes, placements: 1)


def _gradients_are_always_averaged(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.distributed.fsdp import FullyShardedDataParallel

    options = FullyShardedDataParallel._options
    patch.setattr(FullyShardedDataParallel, "_options", lambda self, policy, _: options(self, policy, Fraction(1)))


def _means_are_over_the_inner_axis(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.distributed.fsdp.mesh import group_mesh

    count_averaged: Any = group_mesh.count_averaged

    def inner(axes: Any, placements: Any) -> Any:
        return count_averaged(axes[-1:], SimpleNamespace(gradient=placements.gradient[-1:]))

    patch.setattr(group_mesh, "count_averaged", inner)


def _no_outer_reduction(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.distributed.fsdp.buffers.grad_sums import GradAccumulator

    follow = GradAccumulator.follow

    def alone(self: Any, staging: Any) -> None:
        follow(self, staging)
        if len(staging.axes) == 1:
            return
        rank = staging.axes[0].rank

        def own_part(out: torch.Tensor, segment: torch.Tensor, *, scale: float = 1.0, accumulate: bool = False) -> None:
            begin = rank * out.numel() if out.numel() < segment.numel() else 0
            part = segment[begin : begin + out.numel()] * scale
            out.copy_(out + part if accumulate else part)

        self._last = own_part, self._last[1]

    patch.setattr(GradAccumulator, "follow", alone)


def _outer_reduction_of_the_last_microbatch_alone(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.distributed.fsdp.buffers.grad_sums import GradAccumulator

    finish = GradAccumulator.finish

    def forgetful(self: Any, out: torch.Tensor, **options: Any) -> None:
        if self._inner is not None and not self.sums_locally:
            self.has_sums = False
        finish(self, out, **options)

    patch.setattr(GradAccumulator, "finish", forgetful)


def _only_grad_sums(patch: pytest.MonkeyPatch, *, of_stages: bool) -> None:
    from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup

    make = FsdpParameterGroup._make_grad_sums
    patch.setattr(
        FsdpParameterGroup,
        "_make_grad_sums",
        lambda self: [one for one in make(self) if one.waits_for_use is of_stages],
    )


def _parts_of_the_sequence_keep_their_gradients(patch: pytest.MonkeyPatch) -> None:
    _only_grad_sums(patch, of_stages=True)


def _stages_keep_their_embedding_gradients(patch: pytest.MonkeyPatch) -> None:
    _only_grad_sums(patch, of_stages=False)


def _the_norm_counts_every_replica(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.distributed.fsdp.flat_optimizer import flat_norm

    patch.setattr(flat_norm, "counts_in_norm", lambda parameter: not flat_norm.is_copy(parameter))


def _the_norm_counts_the_tied_copy(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.distributed.fsdp.flat_optimizer import flat_norm

    patch.setattr(flat_norm, "is_copy", lambda parameter: False)


def _the_norm_is_of_this_ranks_part_of_the_model(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.distributed.fsdp.flat_optimizer import flat_norm

    def norm_scope_of(parameter: Any) -> Any:
        mesh, held = parameter.device_mesh, enumerate(parameter.placements)
        return flat_norm.NormScope(mesh, tuple(axis for axis, placement in held if not placement.is_replicate()))

    patch.setattr(flat_norm, "norm_scope_of", norm_scope_of)


def _a_mean_is_over_the_tokens_of_a_part(patch: pytest.MonkeyPatch) -> None:
    from megatron.training.loop import train_step

    patch.setattr(train_step, "group_size", lambda group: 1)


def _token_counts_are_this_ranks(patch: pytest.MonkeyPatch) -> None:
    from megatron.training.loop import train_step

    def of_vectors(tensor: torch.Tensor, group: Any = None) -> None:
        if tensor.dim() > 0:
            dist.all_reduce(tensor, group=group)

    patch.setattr(train_step, "dist", SimpleNamespace(all_reduce=of_vectors))


def _microbatches_are_summed(patch: pytest.MonkeyPatch) -> None:
    from megatron.training.loop.train_step import StepComputation

    scaled = StepComputation.scaled

    def undivided(self: Any, loss: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return scaled(self, loss, tokens) * (1 if self.per_token_loss else self.num_microbatches)

    patch.setattr(StepComputation, "scaled", undivided)


def _a_microbatch_overwrites_those_before(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.distributed.fsdp.buffers.gradients import Gradients

    prepare = Gradients.prepare_main
    patch.setattr(Gradients, "prepare_main", lambda self: prepare(self) or True)


def _no_microbatch_is_the_last(patch: pytest.MonkeyPatch) -> None:
    from megatron.training.loop import train_step

    microbatch = train_step.microbatch  # type: ignore[attr-defined]
    patch.setattr(
        train_step,
        "microbatch",
        lambda model, *, is_first, is_last: microbatch(model, is_first=is_first, is_last=False),
    )


def _experts_are_balanced_over_a_ranks_own_tokens(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    forward = TopKRouter.forward

    def alone(self: Any, *args: Any, **options: Any) -> Any:
        self.tp_cp_group = None
        return forward(self, *args, **options)

    patch.setattr(TopKRouter, "forward", alone)


def _routers_know_no_microbatches(patch: pytest.MonkeyPatch) -> None:
    from megatron.training.loop import train_step

    patch.setattr(train_step, "set_num_microbatches", lambda model, num_microbatches: None)


def _expert_biases_follow_a_ranks_own_tokens(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.moe import expert_bias

    patch.setattr(expert_bias, "_groups_of_tokens", lambda groups: [])


def _parts_of_a_sequence_begin_at_its_start(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.models.common.embeddings import rotary_pos_embedding

    patch.setattr(
        rotary_pos_embedding,
        "positions_on_this_cp_rank",
        lambda length, group, device: torch.arange(length // group.size(), device=device),
    )


def _split_columns_keep_their_inputs_gradients(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.tensor_parallel import column_function

    patch.setattr(column_function, "begin_sum", lambda tensor, group: SimpleNamespace(wait=lambda: tensor))


def _auxiliary_losses_are_not_scaled(patch: pytest.MonkeyPatch) -> None:
    from megatron.training.loop import train_step

    patch.setattr(train_step, "set_loss_scale", lambda model, scale: None)


def _the_loss_scale_is_undone_after_clipping(patch: pytest.MonkeyPatch) -> None:
    """The norm is that of scaled gradients."""
    from megatron.core.optimizer import MegatronOptimizer

    unscaled: Any = MegatronOptimizer._unscaled
    patch.setattr(MegatronOptimizer, "_unscaled", lambda self, norm: (norm, *unscaled(self, norm)[1:]))


def _the_loss_scale_is_never_undone(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.optimizer.grad_scaler import MegatronGradScaler

    patch.setattr(MegatronGradScaler, "inv_scale", property(lambda self: torch.ones_like(self.scale)))


def _each_rank_has_the_first_ones_sinks(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer import attention_sinks

    patch.setattr(attention_sinks, "group_of", lambda groups, name: None)
    describe = attention_sinks.AttentionSinks.describe_parameter

    def first_part(self: Any, name: str, shape: Any, init_method: Any, **options: Any) -> Any:
        return describe(self, name, (shape[0] // self.config.tensor_model_parallel_size,), init_method, **options)

    patch.setattr(attention_sinks.AttentionSinks, "describe_parameter", first_part)


def _windows_end_at_chunks(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer import context_parallel_window

    tails = context_parallel_window._tails
    patch.setattr(
        context_parallel_window,
        "_tails",
        lambda *args: {chunk: tail[:0] for chunk, tail in tails(*args).items()},
    )


def _tails_are_of_neighbours_ranks(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer import context_parallel_window

    patch.setattr(context_parallel_window, "chunk_order", lambda size: list(range(2 * size)))


def _shared_keys_keep_a_part_of_their_gradient(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer import multi_latent_attention

    gather: Any = multi_latent_attention.gather_from_sequence_parallel_region  # type: ignore[attr-defined]
    patch.setattr(multi_latent_attention, "copy_to_tensor_model_parallel_region", lambda x, group: x)
    patch.setattr(
        multi_latent_attention, "gather_from_sequence_parallel_region", lambda x, group: gather(x, False, group)
    )


def _down_projections_keep_a_part_of_their_gradients(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.tensor_parallel.layers import WholeLinear

    patch.setattr(
        WholeLinear,
        "_add_weight",
        lambda self, init, stride: self.add_parameter("weight", (self.output_size, self.input_size), init),
    )


def _the_norm_counts_each_copy_of_the_down_projections(patch: pytest.MonkeyPatch) -> None:
    """As where they were built as column-parallel layers without a group."""
    from megatron.core.tensor_parallel.layers import WholeLinear

    add = WholeLinear._add_weight

    def marked(self: Any, init: Any, stride: int) -> None:
        add(self, init, stride)
        self.set_parameter_attribute("weight", "tensor_model_parallel", True)

    patch.setattr(WholeLinear, "_add_weight", marked)


def _rows_of_a_matrix_change_places(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.distributed.fsdp.matrices import orthogonalizer

    by_position = orthogonalizer._by_position
    patch.setattr(orthogonalizer, "_by_position", lambda matrix: by_position(matrix)[::-1])


def _parts_are_matrices_of_their_own(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.distributed.fsdp.matrices import shared_matrix

    patch.setattr(shared_matrix, "_tensor_split", lambda group, index: (None, 0))


def _stages_of_a_rank_follow_each_other(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.pipeline_layers import stage_of

    def consecutive(config: Any, *, pp_rank: int, vp_stage: int | None, num_ranks: int) -> Any:
        stages = config.virtual_pipeline_model_parallel_size or 1
        index = pp_rank * stages + (vp_stage or 0)
        return stage_of(config, pp_rank=index % num_ranks, vp_stage=None if stages == 1 else index // num_ranks)

    patch.setattr(transformer_block, "stage_of", consecutive)


def _stages_have_the_first_microbatch_alone(patch: pytest.MonkeyPatch) -> None:
    from megatron.training.loop.stage_forward import SharedBatches

    get: Any = SharedBatches.__getitem__
    first: dict[int, Any] = {}

    def mixed_up(self: Any, index: int) -> Any:
        batch = get(self, index)
        return first.setdefault(id(self), batch)

    patch.setattr(SharedBatches, "__getitem__", mixed_up)


def _the_norm_is_of_the_last_stage_of_a_rank(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.distributed.fsdp.flat_optimizer.flat_norm import FlatGradNorm

    init = FlatGradNorm.__init__

    def of_one(self: Any, groups: Any) -> None:
        contexts = [group.context() for group in groups]
        init(self, [group for group, own in zip(groups, contexts, strict=True) if own is contexts[-1]])

    patch.setattr(FlatGradNorm, "__init__", of_one)


def _tokens_are_not_rolled(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer import multi_token_prediction

    patch.setattr(multi_token_prediction, "roll_tensor", lambda tensor, **_: (tensor, None))


def _parts_of_a_sequence_are_rolled_by_themselves(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer import multi_token_prediction

    roll = multi_token_prediction.roll_tensor
    patch.setattr(
        multi_token_prediction, "roll_tensor", lambda tensor, cp_group=None, **settings: roll(tensor, **settings)
    )


def _losses_of_later_tokens_know_no_microbatches(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLosses

    patch.setattr(MultiTokenPredictionLosses, "set_num_microbatches", lambda self, _: setattr(self, "scale", 0.25))


def _the_embeddings_of_later_tokens_keep_their_gradients(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.models.gpt.gpt_model import GPTModel

    mark: Any = GPTModel._mark_embedding

    def unmarked(self: Any) -> None:
        mark(self)
        for module in self.embedding.children():
            module.set_parameter_attribute("weight", "shared_embedding", False)

    patch.setattr(GPTModel, "_mark_embedding", unmarked)


MUTATIONS = {
    "stages of a rank follow each other": Mutation(_stages_of_a_rank_follow_each_other, "vp"),
    "stages of a rank have the first microbatch alone": Mutation(_stages_have_the_first_microbatch_alone, "vp"),
    "the norm is of the last stage of a rank": Mutation(_the_norm_is_of_the_last_stage_of_a_rank, "vp"),
    "tokens are not rolled": Mutation(_tokens_are_not_rolled, "mtp cp"),
    "parts of a sequence are rolled by themselves": Mutation(_parts_of_a_sequence_are_rolled_by_themselves, "mtp cp"),
    "losses of later tokens know no microbatches": Mutation(_losses_of_later_tokens_know_no_microbatches, "mtp"),
    "the embeddings of later tokens keep their gradients": Mutation(
        _the_embeddings_of_later_tokens_keep_their_gradients, "mtp"
    ),
    "auxiliary losses are not scaled": Mutation(_auxiliary_losses_are_not_scaled, "moe sp, moe cp"),
    "the loss scale is undone after clipping": Mutation(
        _the_loss_scale_is_undone_after_clipping, "fsdp, hfsdp, moe sp, moe cp"
    ),
    "the loss scale is never undone": Mutation(_the_loss_scale_is_never_undone, "fsdp, hfsdp, moe sp, moe cp"),
    "experts are averaged over their own ranks": Mutation(_experts_are_averaged_over_their_own_ranks, "ep"),
    "gradients are averaged also per token": Mutation(_gradients_are_always_averaged, "fsdp, hfsdp, moe sp, moe cp"),
    "means are over the inner axis alone": Mutation(_means_are_over_the_inner_axis, "hsdp, hfsdp, moe cp"),
    "no outer reduction": Mutation(_no_outer_reduction, "hsdp, hfsdp, moe cp"),
    "the outer reduction has the last microbatch alone": Mutation(
        _outer_reduction_of_the_last_microbatch_alone, "hsdp"
    ),
    "sequence-parallel gradients are not summed over tp": Mutation(
        _parts_of_the_sequence_keep_their_gradients, "sp, moe sp"
    ),
    "tied embeddings' gradients are not summed over stages": Mutation(_stages_keep_their_embedding_gradients, "pp"),
    "the norm counts every replica": Mutation(_the_norm_counts_every_replica, "tp, sp, moe sp"),
    "the norm counts the tied copy": Mutation(_the_norm_counts_the_tied_copy, "pp"),
    "the norm is of this rank's part of the model": Mutation(_the_norm_is_of_this_ranks_part_of_the_model, "pp, ep"),
    "a mean is over a context-parallel rank's own tokens": Mutation(_a_mean_is_over_the_tokens_of_a_part, "cp"),
    "token counts are this rank's": Mutation(_token_counts_are_this_ranks, "fsdp, hfsdp, cp, moe sp, moe cp"),
    "microbatches are summed": Mutation(_microbatches_are_summed, "hsdp, sp, pp, ep"),
    "a microbatch's gradient replaces the earlier ones": Mutation(
        _a_microbatch_overwrites_those_before, "fsdp, sp, pp, ep"
    ),
    "no microbatch is the last": Mutation(
        _no_microbatch_is_the_last,
        "hsdp, hfsdp, tp, moe cp",
        refused=("optimizer.step() needs gradients reduced over the ranks", "loss and gradient must be finite"),
    ),
    "experts are balanced over a rank's own tokens": Mutation(
        _experts_are_balanced_over_a_ranks_own_tokens, "moe sp, moe cp"
    ),
    "routers know no microbatches": Mutation(_routers_know_no_microbatches, "ep"),
    "expert biases follow a rank's own tokens": Mutation(_expert_biases_follow_a_ranks_own_tokens, "moe bias"),
    "parts of a sequence begin at its start": Mutation(_parts_of_a_sequence_begin_at_its_start, "cp, latent cp"),
    "split columns keep their inputs' gradients": Mutation(_split_columns_keep_their_inputs_gradients, "tp"),
    "each rank has the first one's sinks": Mutation(_each_rank_has_the_first_ones_sinks, "windows tp"),
    "windows end at chunks": Mutation(_windows_end_at_chunks, "windows cp"),
    "windows reach into chunks of neighbouring ranks": Mutation(_tails_are_of_neighbours_ranks, "windows cp"),
    "shared keys keep a rank's part of their gradient": Mutation(
        _shared_keys_keep_a_part_of_their_gradient, "latent tp, latent sp"
    ),
    "down-projections keep a rank's part of their gradients": Mutation(
        _down_projections_keep_a_part_of_their_gradients, "latent sp"
    ),
    "the norm counts each rank's copy of the down-projections": Mutation(
        _the_norm_counts_each_copy_of_the_down_projections, "latent tp, latent sp"
    ),
    "ranks' rows of a matrix change places": Mutation(_rows_of_a_matrix_change_places, "muon tp"),
    "tensor-parallel parts are matrices of their own": Mutation(_parts_are_matrices_of_their_own, "muon tp"),
}


def reddened(pairs: list[tuple[str, str]]) -> dict[tuple[str, str], list[str]]:
    """What the (mutation, probe) pairs make differ from one process."""
    jobs = [(CELLS[PROBES[probe]], mutation) for mutation, probe in pairs]
    expected = run_references([cell.reference for cell, _ in jobs])
    ran = run_mutated(jobs)
    return {
        pair: differences(ran[cell.name, pair[0]], expected[cell.reference])
        for pair, (cell, _) in zip(pairs, jobs, strict=True)
    }


def main(names: list[str]) -> int:
    """Print which probes each fault reddens; 1 where one of the table is not among them."""
    status = 0
    for name in names or MUTATIONS:
        found = reddened([(name, probe) for probe in PROBES])
        red = [probe for (_, probe), lines in found.items() if lines]
        expected = MUTATIONS[name].reddens.split(", ")
        missed = [probe for probe in expected if not MUTATIONS[name].is_seen(found[name, probe])]
        status |= bool(missed)
        print(f"{name}: {', '.join(red)}" + (f"  (not seen by {', '.join(missed)})" if missed else ""), flush=True)
        for (_, probe), lines in found.items():
            if lines:
                print(f"    {probe}: {lines[0].strip().splitlines()[-1][:150]} (+{len(lines) - 1})", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

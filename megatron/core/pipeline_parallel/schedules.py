"""Forward and backward of a global batch, under Megatron-Core's names: callers give the forward step and the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.distributed import ProcessGroup

from megatron.core.model_wrappers import chunks_of, get_attr_wrapped_model, get_model_config
from megatron.core.parallel_state import get_virtual_pipeline_model_parallel_world_size
from megatron.core.pipeline_parallel.interleaved_pipeline import StagePipeline
from megatron.core.pipeline_parallel.interleaved_schedule import get_schedule_table as get_schedule_table
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, PipelineStage, hidden_shape
from megatron.core.process_groups_config import (
    MultiModuleProcessGroupCollection,
    ProcessGroupCollection,
    group_of,
    group_size,
    of_one_model,
)
from megatron.core.transformer.moe.alternating_passes import alternating_passes
from megatron.core.transformer.moe.auxiliary_losses import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import set_loss_scale, set_num_microbatches
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from megatron.core.transformer.pipeline_layers import wide_messages

LossFunction = Callable[..., Any]
"""model's output -> (loss, values to report), or (sum of losses, tokens, values to report)."""
ForwardStep = Callable[..., tuple[Tensor, LossFunction | None]]
"""(data iterator, model) -> (model's output, loss function); the loss function is called on the last stage."""


def get_forward_backward_func(
    pp_size: int | None = None, vp_size: int | None = None, schedule_pg_collection: Any = None
) -> Callable[..., list[Any]]:
    """Return the function that runs forward and backward of all microbatches of a step.

    Args:
        pp_size: ranks of a pipeline; None: that of ``parallel_state``.
        vp_size: stages of each rank, which take turns; None with ``pp_size`` None: that of ``parallel_state``.
        schedule_pg_collection: a ``MultiModuleProcessGroupCollection``, of one model; its pipeline is then the model's.

    Raises:
        NotImplementedError: stages are of several models.
    """
    if of_one_model(schedule_pg_collection) is not None:
        return forward_backward_pipelining_without_interleaving
    if pp_size is None:
        pp_size = group_size(group_of(None, "pp"))
        vp_size = vp_size or get_virtual_pipeline_model_parallel_world_size()
    if pp_size == 1:
        return forward_backward_no_pipelining
    if vp_size is not None:
        return forward_backward_pipelining_with_interleaving
    return forward_backward_pipelining_without_interleaving


def forward_backward_no_pipelining(
    *,
    forward_step_func: ForwardStep,
    data_iterator: Iterator[Any] | Sequence[Iterator[Any]] | None,
    model: torch.nn.Module | Sequence[torch.nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
    p2p_communicator: Any = None,
    pg_collection: ProcessGroupCollection | MultiModuleProcessGroupCollection | None = None,
    force_all_reduce: bool | None = False,
) -> list[Any]:
    """Run forward and backward of all microbatches on a rank's pipeline stages; one stage is a pipeline, too.

    The loss function returns (loss, report): the loss is multiplied by the context-parallel ranks and divided by the
    microbatches. Or (sum of losses, tokens, report): the sum is divided by the tokens and by the microbatches, unless the
    configuration's ``calculate_per_token_loss`` leaves both to ``finalize_model_grads``. Microbatches but the last run within
    ``no_sync_func`` of the configuration; after the last backward its ``finalize_model_grads_func`` is called.

    Args:
        forward_step_func: called with the data iterator and the model.
        data_iterator: one, or one for each chunk.
        model: the stage of this rank, or its chunks: several stages, which take turns (interleaved 1F1B).
        seq_length, micro_batch_size: shape of the messages between stages.
        forward_only: no backward, and no autograd.
        collect_non_loss_data: the loss function is called with ``non_loss_data=True``, and what it returns is collected.
        first_val_step, force_all_reduce: accepted; nothing is cached between steps, and each strategy reduces in one way.
        adjust_tensor_shapes_fn: must be None.
        p2p_communicator: None, or a ``P2PCommunicator`` of the same ``pp`` group.
        pg_collection: None: the groups of ``parallel_state``. A ``MultiModuleProcessGroupCollection`` must be of one model.

    Returns:
        [M] what the loss function reported; [] on all ranks but the last.

    Raises:
        NotImplementedError: an argument is not served.
        ValueError: there are other numbers of iterators than of chunks, or too few microbatches for stages that take turns.

    Ranks: all of the model's groups.
    Source: Megatron-Core's function of this name.
    """
    pg_collection = of_one_model(pg_collection)
    stages = group_of(pg_collection, "pp")
    if adjust_tensor_shapes_fn is not None or not _is_of(p2p_communicator, stages):
        raise NotImplementedError(
            "adjust_tensor_shapes_fn must be None, and p2p_communicator None or a P2PCommunicator of the model's pp group, got "
            f"{adjust_tensor_shapes_fn} and {p2p_communicator}: messages have the shape of hidden states"
        )
    chunks = chunks_of(model)
    iterators = list(data_iterator) if isinstance(data_iterator, list | tuple) else [data_iterator]
    iterators = iterators * len(chunks) if iterators == [None] else iterators
    if len(chunks) != len(iterators):
        raise ValueError(
            f"data_iterator must be one for each of the {len(chunks)} chunks of the model, got {len(iterators)}: each chunk of a "
            "rank computes the same microbatches"
        )
    stage = _stage(chunks[0], pg_collection, decoder_seq_length or seq_length, micro_batch_size)
    stage = replace(stage, num_chunks=len(chunks))
    runs = [
        _Microbatches(chunk, iterator, forward_step_func, own, num_microbatches, group_of(pg_collection, "cp"))
        for chunk, iterator, own in zip(chunks, iterators, stage.of_chunks, strict=True)
    ]
    last = runs[-1]
    for run in runs:
        run.collects_other_data = collect_non_loss_data
    passes = None if forward_only else alternating_passes(chunks, last.config)
    timers, pipeline = last.config.timers, StagePipeline(stage, last.config, passes)
    _timed(timers, "forward-backward", "start")
    if forward_only:
        pipeline.forward_only(runs, num_microbatches)
    else:
        pipeline.forward_backward(runs, num_microbatches)
        _finalize(chunks, last, pg_collection, force_all_reduce)
    _timed(timers, "forward-backward", "stop")
    return last.reports


forward_backward_pipelining_without_interleaving = forward_backward_no_pipelining
forward_backward_pipelining_with_interleaving = forward_backward_no_pipelining


def get_tensor_shapes(
    *,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None,
    config: Any,
    tp_group: ProcessGroup | None = None,
    cp_group: ProcessGroup | None = None,
) -> list[tuple[int, ...]]:
    """Return the shapes of the messages between stages: one, [s, b, h] of hidden states."""
    shape = hidden_shape(
        seq_length=decoder_seq_length or seq_length,
        micro_batch_size=micro_batch_size,
        hidden_size=config.hidden_size,
        context_parallel_size=group_size(cp_group),
        tensor_model_parallel_size=group_size(tp_group),
        sequence_parallel=config.sequence_parallel,
    )
    return [shape]


def _is_of(communicator: Any, stages: ProcessGroup | None) -> bool:
    """Return whether a caller's communicator sends between these stages."""
    if communicator is None:
        return True
    return isinstance(communicator, P2PCommunicator) and (
        communicator.pp_group is stages or communicator.total_stages == group_size(stages) == 1
    )


def _stage(
    model: torch.nn.Module, groups: ProcessGroupCollection | None, seq_length: int, micro_batch_size: int
) -> PipelineStage:
    config, parameter = get_model_config(model), next(iter(model.parameters()), torch.empty(0))
    group = group_of(groups, "pp")
    if group_size(group) == 1:
        return PipelineStage(group=group, device=parameter.device)
    (shape,) = get_tensor_shapes(
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=None,
        config=config,
        tp_group=group_of(groups, "tp"),
        cp_group=group_of(groups, "cp"),
    )
    # Float16Module leaves params_dtype of the configuration as it is.
    computes_in = torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else config.params_dtype
    dtype = torch.float32 if config.fp32_residual_connection else computes_in
    return PipelineStage(
        group=group,
        hidden_shape=(shape[0], shape[1], shape[2]),
        dtype=config.pipeline_dtype or dtype,
        device=parameter.device,
        **(wide_messages(config) if getattr(config, "mtp_num_layers", None) else {}),
    )


def _finalize(
    chunks: list[torch.nn.Module],
    last: _Microbatches,
    groups: ProcessGroupCollection | None,
    force_all_reduce: bool | None,
) -> None:
    finalize = last.config.finalize_model_grads_func
    if finalize is None:
        return
    tokens = last.num_tokens if last.per_token else None
    finalize(chunks, tokens, pg_collection=groups, force_all_reduce=force_all_reduce)


class _Microbatches:
    """The microbatches of a step, as ``Pipeline`` runs them.

    Attributes:
        reports: what the loss function reported, on the last stage.
        num_tokens: [] tokens that the loss function counted so far.
    """

    collects_other_data = False

    def __init__(
        self,
        model: torch.nn.Module,
        data: Any,
        forward_step: ForwardStep,
        stage: PipelineStage,
        num_microbatches: int,
        cp_group: ProcessGroup | None,
    ) -> None:
        self.model, self.data, self.forward_step, self.stage = model, data, forward_step, stage
        self.num_microbatches, self.cp_size = num_microbatches, group_size(cp_group)
        self.config = get_model_config(model)
        # A plain ModelParallelConfig does not have it.
        self.per_token = bool(getattr(self.config, "calculate_per_token_loss", False))
        self.reports: list[Any] = []
        self.num_tokens = torch.zeros([], dtype=torch.int, device=stage.device)
        set_num_microbatches(model, num_microbatches)
        scale = self.config.grad_scale_func
        # What layers add to gradients by themselves, such as routers' losses, is scaled like the loss.
        set_loss_scale(model, None if scale is None else scale(torch.ones(1, device=stage.device)))
        self._scale_losses_of_callers()

    def _scale_losses_of_callers(self) -> None:
        """Scale what callers' own layers add to gradients for steps of this many microbatches."""
        config, factor = self.config, torch.ones(1, device=self.stage.device)
        if not (getattr(config, "num_moe_experts", None) or getattr(config, "mtp_num_layers", None)):
            return
        if config.grad_scale_func is not None:
            factor = config.grad_scale_func(factor)
        per_token = self.per_token
        MoEAuxLossAutoScaler.set_loss_scale(factor if per_token else factor * (self.cp_size / self.num_microbatches))
        MTPLossAutoScaler.set_loss_scale(factor if per_token else factor / self.num_microbatches)

    def forward(self, microbatch: int, hidden_states: Tensor | None) -> Tensor:
        """Run the forward step of a microbatch; return what backward starts from."""
        if not self.stage.is_first:
            get_attr_wrapped_model(self.model, "set_input_tensor")(hidden_states)
        _timed(self.config.timers, "forward-compute", "start")
        with self._synchronising(microbatch):
            output, loss_function = self.forward_step(self.data, self.model)
        if self.stage.is_last:
            output = self._loss(output, loss_function)
        _timed(self.config.timers, "forward-compute", "stop")
        return output

    def backward(self, microbatch: int, output: GradientEdge, gradient: Tensor | None) -> None:
        """Run the backward of a microbatch."""
        _timed(self.config.timers, "backward-compute", "start")
        with self._synchronising(microbatch):
            torch.autograd.backward(output, gradient)
        _timed(self.config.timers, "backward-compute", "stop")

    def _synchronising(self, microbatch: int) -> AbstractContextManager[Any]:
        """Return the context in which gradients are not reduced yet, for all microbatches but the last."""
        given = self.config.no_sync_func
        if isinstance(given, list | tuple):  # of all chunks
            given = given[self.stage.chunk]
        no_sync = given or getattr(self.model, "no_sync", nullcontext)
        is_last = microbatch == self.num_microbatches - 1
        return nullcontext() if is_last else no_sync()

    def _loss(self, output: Tensor, loss_function: LossFunction | None) -> Tensor:
        if loss_function is None:
            self.reports.append(output)
            return output
        if self.collects_other_data:
            self.reports.append(loss_function(output, non_loss_data=True))
            return output
        found = loss_function(output)
        loss: Tensor = found[0]
        if len(found) == 3:
            tokens = found[1].detach()
            self.num_tokens += tokens.to(self.num_tokens.dtype)
            if not self.per_token:
                loss = loss / tokens.clamp(min=1) / self.num_microbatches
        else:
            loss = loss * self.cp_size / self.num_microbatches
        self.reports.append(found[-1])
        if self.config.grad_scale_func is not None and torch.is_grad_enabled():
            loss = self.config.grad_scale_func(loss)
        return loss


def _timed(timers: Callable[..., Any] | None, name: str, act: str) -> None:
    if timers is not None:
        getattr(timers(name, log_level=1 if name == "forward-backward" else 2), act)()

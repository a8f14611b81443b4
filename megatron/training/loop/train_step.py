"""A training step: forward and backward of all microbatches, the update, and its results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge

from megatron.core.distributed.fsdp import FullyShardedDataParallel, ModelChunks, microbatch
from megatron.core.full_cuda_graph import FullCudaGraph
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import PipelineStage, StagePipeline
from megatron.core.process_groups_config import group_rank, group_size
from megatron.core.tensor_parallel.random import rng_tracker_of, seed_streams
from megatron.core.transformer.moe.alternating_passes import alternating_passes
from megatron.core.transformer.moe.expert_bias import routers_with_bias, update_expert_biases
from megatron.core.transformer.moe.moe_layer import num_expert_layers
from megatron.core.transformer.moe.router import record_auxiliary_losses, set_loss_scale, set_num_microbatches
from megatron.training.data.batches import BatchConfig
from megatron.training.loop.dropout_seed import microbatch_seed
from megatron.training.loop.stage_forward import Batch, ForwardStep, SharedBatches, stages_of_rank

Draw = Callable[..., None]
"""``draw(i, c)`` seeds the random generators for microbatch ``i`` on this rank's stage ``c``; ``draw(i)`` on the only one."""

__all__ = ["Batch", "ForwardStep", "StepComputation", "StepRecord", "TrainStep"]


class StepRecord(NamedTuple):
    """The results of a step; all tensors are on the device, and the host has not waited for them."""

    loss_and_tokens: Tensor
    """[2] this rank's sums of losses and of tokens over its microbatches, in fp64, so that counts are exact. All stages of a
    pipeline have those of the last one."""
    grad_norm: Tensor
    """[] gradient norm of the whole model, before clipping and without the loss scale; not finite of a step that was skipped."""
    num_zeros_in_grad: Tensor | None
    update_successful: bool
    """False: gradients overflowed under the loss scale, and the step was skipped."""
    auxiliary_losses: Tensor | None = None
    """[A] auxiliary losses in the order of ``auxiliary_loss_names``, fp64. Their sum over all ranks is the mean over layers
    with experts, microbatches and data-parallel ranks. None: the model has none."""
    loss_scale: Tensor | None = None
    """[1] the loss scale after the step; None: losses are not scaled."""


class PartTimer(Protocol):
    """What is told when parts of a step begin and end."""

    def start(self, name: str) -> None: ...

    def stop(self, name: str) -> None: ...


class StepComputation:
    """The device work of a step, which can be captured and replayed.

    The minimised loss is the mean, over microbatches and data-parallel ranks, of the mean loss over a microbatch's tokens
    (those of all ranks that share its sequences). With ``per_token_loss`` it is the mean over all tokens of the global batch.

    Args:
        model: the sharded model; its process groups say which ranks share sequences and which average gradients.
        per_token_loss: the engine sums gradients over ranks instead of averaging them, and the step scales them once.
        stage: this rank's pipeline stage; None: the model is not split into stages.

    Attributes:
        timer: of the parts of steps; None: they are not timed.

    Ranks: all of the model's groups.
    """

    def __init__(
        self,
        model: FullyShardedDataParallel | ModelChunks,
        optimizer: MegatronOptimizer,
        forward_step: ForwardStep,
        *,
        num_microbatches: int,
        per_token_loss: bool,
        device: torch.device,
        stage: PipelineStage | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.per_token_loss, self.device = per_token_loss, device
        self.stage = stage or PipelineStage()
        self.stages = stages_of_rank(model, forward_step, self.stage)
        passes = alternating_passes([own for own, _ in self.stages], model.config)
        self.pipeline = StagePipeline(self.stage, model.config, passes)
        self.set_num_microbatches(num_microbatches)
        self.auxiliary_losses = record_auxiliary_losses(model, model.config)
        self.biased_routers = routers_with_bias(model)
        if optimizer.grad_scaler is not None:
            set_loss_scale(model, optimizer.grad_scaler.scale)
        self.timer: PartTimer | None = None
        self.microbatch = 0  # whose forward or backward has begun last

    def set_num_microbatches(self, num_microbatches: int) -> None:
        """Run steps of so many microbatches from the next one on."""
        self.num_microbatches = num_microbatches
        set_num_microbatches(self.model, num_microbatches)

    def __call__(self, microbatches: Iterable[Batch], draw: Draw) -> dict[str, Tensor]:
        """Run one step; return the tensors of a ``StepRecord`` by name. Does not block the host.

        Args:
            microbatches: [M] microbatches of this rank.
            draw: seeds the random generators for each forward.
        """
        if self.auxiliary_losses is not None:
            self.auxiliary_losses.clear()
        shared = SharedBatches(iter(microbatches), len(self.stages))
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        stages = [_Microbatches(self, chunk, shared, draw, sums) for chunk in range(len(self.stages))]
        timer = self.timer
        if timer is not None:
            timer.start("forward-backward")
        self.pipeline.forward_backward(stages, self.num_microbatches)
        if self.stage.num_stages > 1:
            dist.all_reduce(sums, group=self.stage.group)  # only those of the last stage are not zero
        if self.per_token_loss:
            tokens = sums[1].clone()
            groups = self.model.pg_collection
            dist.all_reduce(tokens, group=groups.dp_cp or groups.dp)
            self.model.scale_gradients((1.0 / tokens.clamp(min=1.0)).float())
        update_expert_biases(
            self.biased_routers, self.model.config.moe_router_bias_update_rate, self.model.pg_collection
        )
        if timer is not None:
            timer.stop("forward-backward")
            timer.start("optimizer")
        result = self.optimizer.launch_step()
        self.optimizer.zero_grad(set_to_none=True)
        if timer is not None:
            timer.stop("optimizer")
        results = {"loss_and_tokens": sums, "grad_norm": result.grad_norm}
        if result.found_inf is not None:
            results["found_inf"], results["loss_scale"] = result.found_inf, self.optimizer.get_loss_scale().clone()
        if result.num_zeros_in_grad is not None:
            results["num_zeros_in_grad"] = result.num_zeros_in_grad
        if self.auxiliary_losses is not None:
            sums_of_losses = self.auxiliary_losses.take(self.device)
            sums_of_losses /= self.num_microbatches * group_size(self.model.pg_collection.dp)
            of_layers = len(sums_of_losses) - (self.model.config.mtp_num_layers or 0)  # each of a router
            if of_layers:
                sums_of_losses[:of_layers] /= num_expert_layers(self.model.config)
            results["auxiliary_losses"] = sums_of_losses
        return results

    def scaled(self, loss: Tensor, tokens: Tensor) -> Tensor:
        """Scale a microbatch's sum of losses to the loss that backward starts from. Ranks: all that share its sequences."""
        return self.optimizer.scale_loss(self._weighted(loss, tokens))

    def _weighted(self, loss: Tensor, tokens: Tensor) -> Tensor:
        if self.per_token_loss:
            return loss
        cp_group = self.model.pg_collection.cp
        num_parts = group_size(cp_group)
        if num_parts > 1:
            # The engine averages gradients over these ranks, but each has the losses of its part alone.
            tokens = tokens.detach().clone()
            dist.all_reduce(tokens, group=cp_group)
            loss = loss * num_parts
        return loss / (tokens.clamp(min=1) * self.num_microbatches)


class _Microbatches:
    """The microbatches of one step on one of this rank's stages, as ``StagePipeline.forward_backward`` runs them.

    Args:
        sums: [2] sums of losses and tokens so far, fp64, to which the last stage adds.
    """

    def __init__(self, step: StepComputation, chunk: int, batches: SharedBatches, draw: Draw, sums: Tensor) -> None:
        self.step, self.chunk, self.batches, self.draw, self.sums = step, chunk, batches, draw, sums
        self.model, self.stage_forward = step.stages[chunk]

    def forward(self, index: int, hidden_states: Tensor | None) -> Tensor:
        self.step.microbatch = index
        timer = self.step.timer
        if timer is not None:
            timer.start("batch-generator")
        data = self.batches[index]
        if timer is not None:
            timer.stop("batch-generator")
            timer.start("forward-compute")
        # After the batch, since loaders may draw random numbers, on which dropout must not depend.
        if self.chunk == 0:
            self.draw(index)
        else:
            self.draw(index, self.chunk)
        with microbatch(self.model, is_first=index == 0, is_last=False):
            output = self.stage_forward(data, hidden_states)
        if timer is not None:
            timer.stop("forward-compute")
        if isinstance(output, Tensor):
            return output
        loss, tokens = output
        self.sums += torch.stack((loss.detach().double(), tokens.detach().double()))
        return self.step.scaled(loss, tokens)

    def backward(self, index: int, output: GradientEdge, gradient: Tensor | None) -> None:
        is_last = index == self.step.num_microbatches - 1
        timer = self.step.timer
        if timer is not None:
            timer.start("backward-compute")
        with microbatch(self.model, is_first=False, is_last=is_last):
            torch.autograd.backward(output, gradient)
        if timer is not None:
            timer.stop("backward-compute")


class TrainStep:
    """A training step; each call trains on one global batch.

    Args:
        computation: the device work of the step.
        seed: seed of dropout; see ``microbatch_seed``.
        rank: index of this rank among the ``batch.data_parallel_size`` ranks that compute different samples.
        graph: captures ``computation`` and replays it; None: every step is eager.

    Raises:
        ValueError: the model has a setting that a captured step does not support.

    Ranks: all of the model's process groups.
    """

    def __init__(
        self,
        computation: StepComputation,
        scheduler: OptimizerParamScheduler,
        batch: BatchConfig,
        *,
        seed: int,
        rank: int,
        graph: FullCudaGraph | None = None,
    ) -> None:
        self.computation, self.scheduler, self.batch = computation, scheduler, batch
        self.model, self.optimizer = computation.model, computation.optimizer
        self.seed, self.rank, self.graph = seed, rank, graph
        self.trackers = [rng_tracker_of(model) for model, _ in computation.stages]
        if graph is not None:
            _check_capturable(self.model)

    def __call__(self, batches: Iterator[Batch], iteration: int) -> StepRecord:
        """Train on one global batch; does not block the host, unless losses are scaled.

        Args:
            batches: iterator over this rank's microbatches.
            iteration: number of completed iterations.
        """
        count = self.batch.num_microbatches
        seeds = [self._seed(iteration, index) for index in range(count)]
        if self.graph is None:

            def draw(index: int, chunk: int = 0) -> None:
                seed = self._seed(iteration, index, chunk) if chunk else seeds[index]
                seed_streams(seed, self.trackers[chunk])

            results = self.computation((next(batches) for _ in range(count)), draw)
        else:
            # Copies the scheduled rates to the device, where the graph reads them.
            self.optimizer.update_hyperparameters()
            results = self.graph([next(batches) for _ in range(count)], seeds)
        self.model.start_param_sync()
        found_inf = results.get("found_inf")
        # With a loss scale the host waits here, when all work of the step is launched: the schedule needs to know.
        is_skipped = found_inf is not None and bool(found_inf)
        if not is_skipped:
            self.scheduler.step(self.batch.global_batch_size)
        return StepRecord(
            results["loss_and_tokens"],
            results["grad_norm"],
            results.get("num_zeros_in_grad"),
            update_successful=not is_skipped,
            loss_scale=results.get("loss_scale"),
            auxiliary_losses=results.get("auxiliary_losses"),
        )

    def set_batch(self, batch: BatchConfig) -> None:
        """Train on global batches of another size from the next step on; not with a graph, which has one size."""
        assert self.graph is None, "refused before"
        self.batch = batch
        self.computation.set_num_microbatches(batch.num_microbatches)

    def _seed(self, iteration: int, index: int, chunk: int = 0) -> int:
        own = microbatch_seed(self.seed, iteration, index * self.batch.data_parallel_size + self.rank)
        of_rank = self.computation.stage
        stage, part = chunk * of_rank.num_stages + of_rank.index, group_rank(self.model.pg_collection.cp)
        # Stages (other layers) and context-parallel ranks (other parts of the sequences) draw different dropout.
        return microbatch_seed(own, stage, part) if stage or part else own

    def close(self) -> None:
        """Free the captured step, if there is one. Call it before process groups are destroyed."""
        if self.graph is not None:
            self.graph.close()


def _check_capturable(model: FullyShardedDataParallel | ModelChunks) -> None:
    if model.ddp_config.fsdp_all_gather_in_start_param_sync:
        raise ValueError(
            "fsdp_all_gather_in_start_param_sync must be off where steps are captured, got it on: nothing may be gathered "
            "between them; set it to False in the model's DistributedDataParallelConfig"
        )
    if model.ddp_config.check_for_nan_in_grad:
        raise ValueError(
            "check_for_nan_in_grad must be off where steps are captured, got it on: it makes the host wait within a step; "
            "training checks losses and gradient norms between steps"
        )

"""One step of training: forward and backward of all microbatches, the update, and what is reported of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.distributed.fsdp import FullyShardedDataParallel, microbatch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.training.batches import BatchConfig
from megatron.training.dropout_seed import seed_microbatch

Batch = dict[str, Tensor]
ForwardStep = Callable[[Batch, torch.nn.Module], tuple[Tensor, Tensor]]
"""(microbatch, model) -> ([] sum of the losses of the tokens that count, [] how many they are), fp32, on the device."""


class StepRecord(NamedTuple):
    """What a step did; all tensors are on the device and nobody has waited for them."""

    loss_and_tokens: Tensor
    """[2] this rank's sums of losses and of tokens, over its microbatches, in fp64: counts stay exact."""
    grad_norm: Tensor
    """[] of the whole model, before clipping."""
    num_zeros_in_grad: Tensor | None
    update_successful: bool


class TrainStep:
    """Trains on one global batch at each call.

    The gradient is the mean over microbatches and ranks of each microbatch's mean loss over its tokens; with
    ``per_token_loss`` it is that of the mean over all tokens of the global batch.

    Args:
        model: wrapped for sharding.
        seed: of dropout; see ``seed_microbatch``.
        per_token_loss: the engine sums gradients over ranks instead of averaging them, and they are scaled here once.

    Ranks: all of the data-parallel group.
    """

    def __init__(
        self,
        model: FullyShardedDataParallel,
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
        forward_step: ForwardStep,
        batch: BatchConfig,
        *,
        seed: int,
        per_token_loss: bool,
        rank: int,
        device: torch.device,
    ) -> None:
        self.model, self.optimizer, self.scheduler, self.forward_step = model, optimizer, scheduler, forward_step
        self.batch, self.seed, self.per_token_loss = batch, seed, per_token_loss
        self.rank, self.device = rank, device

    def __call__(self, batches: Iterator[Batch], iteration: int) -> StepRecord:
        """The weights have taken one step; does not block the host.

        Args:
            batches: gives this rank's microbatches.
            iteration: iterations that were completed before.
        """
        sums = self._forward_backward(batches, iteration)
        if self.per_token_loss:
            tokens = sums[1].clone()
            dist.all_reduce(tokens)
            self.model.scale_gradients((1.0 / tokens.clamp(min=1.0)).float())
        result = self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.model.start_param_sync()
        self.scheduler.step(self.batch.global_batch_size)
        return StepRecord(sums, result.grad_norm, result.num_zeros_in_grad, result.update_successful)

    def _forward_backward(self, batches: Iterator[Batch], iteration: int) -> Tensor:
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        count = self.batch.num_microbatches
        for index in range(count):
            data = next(batches)
            # After the data: loaders may draw random numbers, and dropout must not depend on that.
            seed_microbatch(self.seed, iteration, index * self.batch.data_parallel_size + self.rank)
            with microbatch(self.model, is_first=index == 0, is_last=index == count - 1):
                loss, tokens = self.forward_step(data, self.model)
                sums += torch.stack((loss.detach().double(), tokens.detach().double()))
                torch.autograd.backward(self._scaled(loss, tokens))
        return sums

    def _scaled(self, loss: Tensor, tokens: Tensor) -> Tensor:
        """The loss whose gradient this microbatch adds."""
        if self.per_token_loss:
            return loss
        return loss / (tokens.clamp(min=1) * self.batch.num_microbatches)

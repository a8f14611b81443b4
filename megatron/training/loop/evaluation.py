"""Evaluation: the loss on held-out data."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.pipeline_parallel import Pipeline, PipelineStage
from megatron.training.data.batches import BatchConfig
from megatron.training.loop.stage_forward import Batch, ForwardStep, StageForward


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    forward_step: ForwardStep,
    batches: Iterator[Batch],
    batch: BatchConfig,
    *,
    eval_iters: int,
    device: torch.device,
    stage: PipelineStage | None = None,
) -> float:
    """Compute the mean loss over all tokens of ``eval_iters`` global batches; leave the model in training mode.

    Args:
        stage: this rank's pipeline stage; None: the model is not split into stages.

    Ranks: all of the run, which all get the same loss; blocks until it is known.
    """
    stage = stage or PipelineStage()
    microbatches = _Microbatches(StageForward(model, forward_step, stage), batches, device)
    model.eval()
    if eval_iters > 0:
        Pipeline(stage).forward_only(microbatches, eval_iters * batch.num_microbatches)
    model.train()
    sums = microbatches.sums
    # Ranks that share samples add the same to both sums, and stages without losses add zeros, so the mean is right.
    dist.all_reduce(sums)
    loss_sum, num_tokens = sums.tolist()
    return float(loss_sum / max(num_tokens, 1.0))


class _Microbatches:
    """The microbatches of an evaluation, as ``Pipeline.forward_only`` runs them."""

    def __init__(self, stage_forward: StageForward, batches: Iterator[Batch], device: torch.device) -> None:
        self.stage_forward, self.batches = stage_forward, batches
        self.sums = torch.zeros(2, device=device, dtype=torch.float64)

    def forward(self, index: int, hidden_states: Tensor | None) -> Tensor:
        output = self.stage_forward(next(self.batches), hidden_states)
        if isinstance(output, Tensor):
            return output
        loss, tokens = output
        self.sums += torch.stack((loss.double(), tokens.double()))
        return loss

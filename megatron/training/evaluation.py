"""The loss on held-out data."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from megatron.training.batches import BatchConfig
from megatron.training.train_step import Batch, ForwardStep


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    forward_step: ForwardStep,
    batches: Iterator[Batch],
    batch: BatchConfig,
    *,
    eval_iters: int,
    device: torch.device,
) -> float:
    """The mean loss over all tokens of ``eval_iters`` global batches; the model is in training mode afterwards.

    Ranks: all of the data-parallel group; blocks until the loss is known.
    """
    model.eval()
    sums = torch.zeros(2, device=device, dtype=torch.float64)
    for _ in range(eval_iters * batch.num_microbatches):
        loss, tokens = forward_step(next(batches), model)
        sums += torch.stack((loss.double(), tokens.double()))
    model.train()
    dist.all_reduce(sums)
    loss_sum, num_tokens = sums.tolist()
    return float(loss_sum / max(num_tokens, 1.0))

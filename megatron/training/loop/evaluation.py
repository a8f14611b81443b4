"""Evaluation: the loss on held-out data."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.pipeline_parallel import PipelineStage, StagePipeline
from megatron.training.loop.stage_forward import Batch, ForwardStep, SharedBatches, StageForward, stages_of_rank


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Settings of the validation data and of evaluations without training."""

    skip_train: bool = False
    """Evaluate on validation and test data what was loaded, and end."""

    full: bool = False
    """A validation reads each sample of its set once, instead of a number of global batches."""

    separate_sets: bool = False
    """Each corpus of the validation data is a set with a loss of its own; otherwise they are blended."""

    set_names: tuple[str, ...] = ()
    """Names of the sets in the log; empty: their numbers from 0 on."""


@dataclass(frozen=True, kw_only=True)
class ValidationSet:
    """Held-out data, as this rank reads them."""

    suffix: str
    """What follows "validation" in log lines and curves: "-name", or nothing where there is one set."""

    batches: Generator[Batch]
    """This rank's microbatches, without an end."""

    num_microbatches: int
    """Microbatches of one evaluation."""

    num_consumed: int
    """Samples of all ranks after which the next evaluation goes on; 0: it begins with the first."""


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    forward_step: ForwardStep,
    batches: Iterator[Batch],
    *,
    num_microbatches: int,
    device: torch.device,
    stage: PipelineStage | None = None,
) -> float:
    """Compute the mean loss over all tokens of some microbatches of all ranks; leave the model in training mode.

    Args:
        num_microbatches: those of one rank.
        stage: this rank's pipeline stage; None: the model is not split into stages.

    Ranks: all of the run, which all get the same loss; blocks until it is known.
    """
    stage = stage or PipelineStage()
    shared = SharedBatches(batches, stage.num_chunks)
    sums = torch.zeros(2, device=device, dtype=torch.float64)
    stages = [_Microbatches(own, shared, sums) for _, own in stages_of_rank(model, forward_step, stage)]
    model.eval()
    if num_microbatches > 0:
        StagePipeline(stage, getattr(model, "config", None)).forward_only(stages, num_microbatches)
    model.train()
    # Ranks that share samples add the same to both sums, and stages without losses add zeros, so the mean is right.
    dist.all_reduce(sums)
    loss_sum, num_tokens = sums.tolist()
    return float(loss_sum / max(num_tokens, 1.0))


class _Microbatches:
    """The microbatches of an evaluation on one stage, as ``StagePipeline.forward_only`` runs them.

    Args:
        sums: [2] sums of losses and tokens, to which the last stage adds.
    """

    def __init__(self, stage_forward: StageForward, batches: SharedBatches, sums: Tensor) -> None:
        self.stage_forward, self.batches, self.sums = stage_forward, batches, sums

    def forward(self, index: int, hidden_states: Tensor | None) -> Tensor:
        output = self.stage_forward(self.batches[index], hidden_states)
        if isinstance(output, Tensor):
            return output
        loss, tokens = output
        self.sums += torch.stack((loss.double(), tokens.double()))
        return loss

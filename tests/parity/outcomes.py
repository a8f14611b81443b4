"""Trains a cell on this rank through the command line's own path, and keeps what it computed, unrounded."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron.core.module_names import named_modules, named_parameters


@dataclass(frozen=True)
class Outcome:
    """What a run led to on this rank."""

    losses: list[float]
    """Mean over the tokens of each step's global batch."""
    norms: list[float]
    """Of each step's gradient, before clipping."""
    weights: dict[str, npt.NDArray[np.float32]]
    """Whole tensors under global names: those of which this rank holds a part."""
    auxiliary: list[list[float]] = field(default_factory=list)
    """[steps] auxiliary losses as they are logged; [] where the model has none."""


def train(argv: list[str]) -> Outcome:
    """The run. Ranks: all that the command line is for."""
    from megatron.core.datasets.mock_corpus import MockGPTLowLevelDataset
    from megatron.training.arguments import parse_settings
    from megatron.training.launch.pretrain import pretrain
    from megatron.training.loop.train_step import TrainStep
    from pretrain_gpt import datasets_provider, forward_step, model_provider

    # Documents shorter than samples: their ends do not count, and microbatches differ in the number of tokens that do.
    MockGPTLowLevelDataset.size, MockGPTLowLevelDataset.max_sequence_length = 600, 14
    step, records, models = TrainStep.__call__, [], []

    def recorded(self: Any, *args: Any) -> Any:
        records.append(step(self, *args))
        models.append(self.model)
        return records[-1]

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr(TrainStep, "__call__", recorded)
        pretrain(
            parse_settings(argv),
            model_provider=model_provider,
            datasets_provider=datasets_provider,
            forward_step=forward_step,
        )
    if not records:
        return Outcome([], [], {})  # a run that loads and saves
    sums = torch.stack([record.loss_and_tokens for record in records])
    dist.all_reduce(sums)  # ranks that share samples add the same to both
    losses = (sums[:, 0] / sums[:, 1]).tolist()
    logged = [record.auxiliary_losses for record in records if record.auxiliary_losses is not None]
    for parts in logged:
        dist.all_reduce(parts)
    norms = [record.grad_norm.item() for record in records]
    return Outcome(losses, norms, _whole_weights(models[-1]), [parts.tolist() for parts in logged])


@torch.no_grad()
def _whole_weights(module: torch.nn.Module) -> dict[str, npt.NDArray[np.float32]]:
    whole: dict[str, npt.NDArray[np.float32]] = {}
    for own_name, parameter in named_parameters(module):
        full = (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).numpy().copy()
        name = getattr(parameter, "canonical_name", own_name.removeprefix("module."))
        assert name not in whole or np.array_equal(whole[name], full), f"two copies of {name} differ"
        whole[name] = full
    for prefix, child in named_modules(module):
        bias = getattr(child, "expert_bias", None)  # a buffer, which steps change too
        if bias is not None:
            name = re.sub(r"^(stages\.[0-9]+\.)?(module\.)*", "", prefix)
            whole[f"{name}.expert_bias"] = bias.numpy().copy()
    return whole

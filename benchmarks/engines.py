"""The engines that are compared: each trains the same model from the same weights, with AdamW on fp32 main weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy as Fsdp2Policy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.plain_gpt import GptShape, Linear, MainGradLinear, PlainGpt, materialize
from megatron.core.distributed.fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer, microbatch

# Tokens and labels [1, t] of each microbatch.
Batch = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What all engines of a run share."""

    shape: GptShape
    mesh: DeviceMesh
    device: torch.device
    learning_rate: float
    seed: int


class Engine:
    """A model and its optimizer, trained a step at a time. Ranks: all of the mesh, alike."""

    model: PlainGpt
    optimizer: torch.optim.Optimizer

    def scope(self, *, is_first: bool, is_last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of one microbatch."""
        return nullcontext()

    def step(self, batch: Batch, *, before_update: Callable[[], None] | None = None) -> Tensor:
        """One optimizer step; returns this rank's mean loss [], without waiting for the device."""
        losses = []
        for index, (tokens, labels) in enumerate(batch):
            with self.scope(is_first=index == 0, is_last=index == len(batch) - 1):
                loss = self.model(tokens, labels) / len(batch)
                loss.backward()
            losses.append(loss.detach())
        if before_update is not None:
            before_update()
        self.optimizer.step()
        self.zero_grad()
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def zero_grad(self) -> None:
        """Afterwards no gradient takes memory."""
        self.optimizer.zero_grad(set_to_none=True)

    def grad_norm(self) -> float:
        """The norm of the whole model's gradient, between backward and update. Blocks. Ranks: all."""
        total = torch.zeros((), device=next(self.model.parameters()).device)
        for parameter in self.model.parameters():
            grad = parameter.grad
            if grad is not None:
                local = grad.to_local() if isinstance(grad, DTensor) else grad
                total += local.detach().float().pow(2).sum()
        dist.all_reduce(total)
        return total.sqrt().item()


class Ours(Engine):
    """Fully sharded by this repository's ``fully_shard`` (ZeRO-3).

    Args:
        linear: class of the linear layers; ``MainGradLinear`` writes weight gradients in place.
        gathers_apart: all-gathers on a communicator of their own, so that they run beside reductions.
    """

    def __init__(self, settings: EngineSettings, *, linear: type, gathers_apart: bool = False) -> None:
        gather_group = dist.new_group() if gathers_apart else None
        policy = MixedPrecisionPolicy(main_params_dtype=torch.float32, grad_comm_dtype=torch.bfloat16)
        with torch.device("meta"):
            model = PlainGpt(settings.shape, linear=linear, dtype=torch.bfloat16, seed=settings.seed)
        for unit in (*model.units(), model):
            fully_shard(unit, settings.mesh, None, policy, fsdp_group_ag=gather_group)
        self.model = model
        self.optimizer = fully_shard_optimizer(_adamw(model.parameters(), settings))

    def scope(self, *, is_first: bool, is_last: bool) -> AbstractContextManager[Any]:
        return microbatch(self.model, is_first=is_first, is_last=is_last)


class Fsdp2(Engine):
    """Fully sharded by PyTorch's ``fully_shard``: fp32 sharded weights, bf16 for compute and on the wire."""

    def __init__(self, settings: EngineSettings) -> None:
        policy = Fsdp2Policy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        with torch.device("meta"):
            model = PlainGpt(settings.shape, linear=Linear, dtype=torch.float32, seed=settings.seed)
        for unit in model.units():
            materialize(unit, settings.device)  # whole, then sharded: no rank holds more than one whole unit
            fsdp2_fully_shard(unit, mesh=settings.mesh, mp_policy=policy)
        fsdp2_fully_shard(model, mesh=settings.mesh, mp_policy=policy)
        self.model = model
        self.optimizer = _adamw(model.parameters(), settings)

    def scope(self, *, is_first: bool, is_last: bool) -> AbstractContextManager[Any]:
        self.model.set_is_last_backward(is_last)  # type: ignore[operator]
        return nullcontext()


class Ideal(Engine):
    """The limit for a sharding engine: bf16 weights resident, no communication, AdamW over 1/N of fp32 state.

    Its weights never change, since nobody gathers what its optimizer updates: a time, not a training run.
    """

    def __init__(self, settings: EngineSettings) -> None:
        with torch.device("meta"):
            self.model = PlainGpt(settings.shape, linear=Linear, dtype=torch.bfloat16, seed=settings.seed)
        materialize(self.model, settings.device)
        generator = torch.Generator(device=settings.device).manual_seed(settings.seed)
        shards = []
        for parameter in self.model.parameters():
            numel = -(-parameter.numel() // settings.mesh.size())
            shard = nn.Parameter(parameter.detach().flatten()[:numel].float())
            # Random, not zeros: arithmetic on zeros draws less power and runs faster.
            shard.grad = torch.empty_like(shard).normal_(0.0, 1e-3, generator=generator)
            shards.append(shard)
        self.optimizer = _adamw(shards, settings)

    def zero_grad(self) -> None:
        self.model.zero_grad(set_to_none=True)  # the shards' gradients stay: nothing would fill them again


def _adamw(parameters: Any, settings: EngineSettings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


ENGINES: dict[str, Callable[[EngineSettings], Engine]] = {
    "ideal": Ideal,
    "fsdp2": Fsdp2,
    "ours": lambda settings: Ours(settings, linear=Linear),
    "ours-linear": lambda settings: Ours(settings, linear=MainGradLinear),
    "ours-linear-ag": lambda settings: Ours(settings, linear=MainGradLinear, gathers_apart=True),
}

WHAT_THEY_ARE = {
    "ideal": "no communication: bf16 weights resident, fused AdamW over 1/N of fp32 state (its weights never change, "
    "so its losses are not comparable after the first step)",
    "fsdp2": "torch.distributed.fsdp.fully_shard, one unit per layer, defaults but for the dtypes",
    "ours": "megatron.core.distributed.fsdp.fully_shard (ZeRO-3) on torch's linear layers",
    "ours-linear": "the same with the framework's linear function, which writes weight gradients in place",
    "ours-linear-ag": "the same with all-gathers on a communicator of their own",
}

"""Trains any model unsharded and sharded, side by side on every rank, and compares whatever a user could compare."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from megatron.core.distributed.fsdp.api.module import contexts_of, fsdp_modules
from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.config.placement import strategy_placements
from megatron.core.distributed.fsdp.dtensor.placements import local_rows
from tests.support.models import assert_at_rest

# The mean over ranks is summed in another order than the reference's, and scaled by 1/ranks afterwards: a few roundings.
RTOL, ATOL = 1e-5, 1e-6

LossOf = Callable[[Any, int, int], torch.Tensor]


def messages_of_the_engine() -> list[str]:
    """Return a list that receives what the engine logs from now on, on this rank."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron.core.distributed.fsdp").addHandler(handler)
    return said


@contextmanager
def warnings_of_the_engine() -> Iterator[list[str]]:
    """Collect the warnings that the engine logs in the scope, on this rank."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron.core.distributed.fsdp")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def shard(model: nn.Module, units: Sequence[str] = (), strategy: str = "optim_grads_params", **settings: Any) -> Any:
    """Shard the named modules, then the model, with main weights in the parameters' own dtype."""
    settings = {"mixed_precision_policy": MixedPrecisionPolicy(main_params_dtype=None), **settings}
    for name in units:
        fully_shard(model.get_submodule(name), placements=strategy_placements(strategy), **settings)
    return fully_shard(model, placements=strategy_placements(strategy), **settings)


def groups_of(model: nn.Module) -> list[FsdpParameterGroup]:
    """All parameter groups of a model."""
    return [group for module in fsdp_modules(model) for group in module.parameter_groups]


def assert_same_parameters(sharded: nn.Module, plain: nn.Module, what: str = "weights") -> None:
    """Names, their order and this rank's rows agree; communicates nothing."""
    mine, theirs = dict(sharded.named_parameters()), dict(plain.named_parameters())
    assert list(mine) == list(theirs)
    for name, parameter in mine.items():
        assert parameter.dtype == theirs[name].dtype and parameter.shape == theirs[name].shape, name
        _assert_close(parameter, theirs[name].detach(), f"{what}, {name}")


def assert_same_gradients(sharded: nn.Module, plain: nn.Module) -> None:
    """This rank's rows agree, where None counts as zero if it stands on the plain side; communicates nothing."""
    theirs = dict(plain.named_parameters())
    for name, parameter in sharded.named_parameters():
        grad, expected = parameter.grad, theirs[name].grad
        if expected is None:
            assert grad is None or not grad.to_local().any(), f"{name} must have no gradient"  # type: ignore[attr-defined]
            continue
        assert grad is not None, f"{name} has no gradient"
        _assert_close(grad, expected, f"gradient of {name}")


def _assert_close(sharded: Any, whole: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(
        sharded.to_local().detach(), local_rows(sharded, whole), rtol=RTOL, atol=ATOL, msg=lambda m: f"{what}: {m}"
    )


def backward_plainly(
    model: nn.Module, loss_of: LossOf, step: int, *, num_microbatches: int = 1, divisor: float | None = None
) -> list[float]:
    """Give ``model`` the gradients that all ranks have together; return the losses [ranks], summed over microbatches."""
    losses = [0.0] * dist.get_world_size()
    for rank in range(len(losses)):
        for index in range(num_microbatches):
            loss = loss_of(model, rank, step * num_microbatches + index)
            losses[rank] += loss.item()
            (loss / (divisor or len(losses))).backward()
    return losses


def assert_trains_alike(
    build: Callable[[], nn.Module],
    wrap: Callable[[Any], Any],
    loss_of: LossOf,
    *,
    steps: int = 3,
    num_microbatches: int = 1,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    divisor: float | None = None,
) -> Any:
    """Losses, gradients and weights of the wrapped model equal the plain model's in each step; returns the wrapped one.

    Args:
        build: the model; weights are drawn from the same seed each time.
        wrap: shards it in place.
        loss_of: (model, rank, step) -> loss; the plain model runs it for every rank.
        steps: three at least run one step that is recorded and two that are planned.
        divisor: what the sum of the ranks' gradients is divided by; the number of ranks when None.
    """
    make_optimizer = make_optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    plain, sharded = seeded(build), seeded(build)
    wrap(sharded)
    contexts = contexts_of(sharded)
    for context in contexts:
        context.change_options(poisons=True)  # what is read after its release turns into NaN
    assert_same_parameters(sharded, plain, "initial weights")
    ours, theirs = make_optimizer(sharded.parameters()), make_optimizer(plain.parameters())
    for step in range(steps):
        ours.zero_grad()
        theirs.zero_grad()
        losses = backward_plainly(plain, loss_of, step, num_microbatches=num_microbatches, divisor=divisor)
        expected, actual = losses[dist.get_rank()], 0.0
        for index in range(num_microbatches):
            loss = loss_of(sharded, dist.get_rank(), step * num_microbatches + index)
            actual += loss.item()
            loss.backward()
        assert abs(actual - expected) <= ATOL + RTOL * abs(expected), f"step {step}: loss {actual}, not {expected}"
        for context in contexts:
            assert_at_rest(context)
        assert_same_gradients(sharded, plain)
        ours.step()
        theirs.step()
        assert_same_parameters(sharded, plain, f"weights after step {step}")
    return sharded


def inputs(rank: int, step: int, *shape: int) -> torch.Tensor:
    """The batch of a rank in a step: normal numbers [shape], the same on whichever rank they are made."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def seeded(build: Callable[[], nn.Module]) -> Any:
    """What ``build`` makes, with the same weights each time, whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return build()


class ThreeLayers(nn.Module):
    """Layers with units of their own, ``UNITS``; a loss may skip the second."""

    UNITS = ("layers.0", "layers.1", "layers.2")

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: torch.Tensor, skips: bool = False) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = x if skips and index == 1 else torch.tanh(layer(x))
        return x

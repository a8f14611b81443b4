"""Functions that keep their weight without ``save_for_backward`` are right, or are refused when they come back late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.distributed.fsdp import fully_shard, fully_shard_context
from tests.support.models import assert_same_gradients
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)

WIDTH, NUM_LAYERS = 8, 3


class OwnMatmul(torch.autograd.Function):
    """Keeps its weight on ``ctx``, where no version is checked."""

    keep: Callable[[torch.Tensor], torch.Tensor] = staticmethod(lambda weight: weight)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.weight = x, OwnMatmul.keep(weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight = ctx.weight if ctx.weight.shape[0] == WIDTH else ctx.weight.view(WIDTH, WIDTH)
        return grad @ weight.t(), ctx.x.t() @ grad


class Layer(nn.Module):
    """Leaves a loss of its router on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.router_loss = OwnMatmul.apply(x, self.router).square().mean()
        out: torch.Tensor = x + torch.tanh(self.linear(x))
        return out


def _models(**arguments: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain, sharded = (nn.Sequential(*(Layer() for _ in range(NUM_LAYERS))) for _ in range(2))
    sharded.load_state_dict(plain.state_dict())
    for layer in sharded:
        fully_shard(layer, **arguments)
    fully_shard(sharded)
    return plain, sharded


def _x() -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


def _losses(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return model(_x()).square().mean(), sum(layer.router_loss for layer in model)


def _train(model: Any, num_steps: int = 4) -> list[Any]:
    """Train with one backward for both losses, and keep the losses, as for a log."""
    kept: list[Any] = []
    for _ in range(num_steps):
        loss = sum(_losses(model))
        loss.backward()
        model.zero_grad()
        kept.append(loss)
    return kept


KEPT: tuple[Callable[[Any], Any], ...] = (
    lambda weight: weight,
    lambda weight: weight.detach(),
    lambda weight: weight.data,
    lambda weight: weight.view(-1),
)


@CHECKS.on(2)
def functions_that_keep_weights_within_their_graph_are_right() -> None:
    for keep in KEPT:
        OwnMatmul.keep = staticmethod(keep)
        plain, model = _models()
        _train(model)
        for own in (plain, model):
            sum(_losses(own)).backward()
        assert_same_gradients(model, plain)
    OwnMatmul.keep = staticmethod(lambda weight: weight)


@CHECKS.on(2)
def a_late_backward_through_a_function_that_kept_its_weight_is_an_error() -> None:
    for keep in KEPT:
        for num_steps in (0, 4):
            OwnMatmul.keep = staticmethod(keep)
            _, model = _models()
            _train(model, num_steps)
            loss, router_loss = _losses(model)
            loss.backward(retain_graph=True)
            with pytest.raises(RuntimeError, match=r"somebody kept|not allocated|storage of size 0"):
                router_loss.backward()
    OwnMatmul.keep = staticmethod(lambda weight: weight)


class PlainLayer(nn.Module):
    """As ``Layer``, of PyTorch's own functions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.router_loss = self.router(x).square().mean()
        out: torch.Tensor = x + torch.tanh(self.linear(x))
        return out


@CHECKS.on(2)
def a_late_backward_of_what_hooks_have_packed_is_an_error() -> None:
    """PyTorch compares no versions of tensors that went through ``saved_tensors_hooks``, as offloading of activations has them."""
    for num_steps in (0, 4):
        model: Any = nn.Sequential(*(PlainLayer() for _ in range(NUM_LAYERS)))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        _train(model, num_steps)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            loss, router_loss = _losses(model)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match=r"somebody kept|not allocated|storage of size 0"):
            router_loss.backward()


@CHECKS.on(2)
def a_late_backward_is_right_where_weights_are_kept_for_it() -> None:
    plain, model = _models(reshard_after_forward=False)
    _train(model)
    for own in (plain, model):
        loss, router_loss = _losses(own)
        router_loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(model, plain)


@CHECKS.on(2)
def the_debug_mode_names_the_read_itself() -> None:
    with fully_shard_context(debug=True):
        _, model = _models()
    seen: list[torch.Tensor] = []
    model[1].register_forward_hook(lambda module, *_: seen.append(module.linear.weight.detach()))
    model(_x())
    with pytest.raises(RuntimeError, match=r"linear\.weight must be read within the forward or backward of its unit"):
        seen[0].norm()


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_kept_weights(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)

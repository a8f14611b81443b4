"""Inference mode, function transforms, fast paths of PyTorch's modules, double backward (item 10, first half)."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.core.distributed.fsdp.situations.kinds import Kind, net, seeded, sgd, train, weights
from tests.core.distributed.fsdp.situations.table import situation

ALL = ("no_shard", "optim_grads_params")


@situation(strategies=ALL)
def inference_mode_as_the_first_forward(kind: Kind) -> Any:
    model = kind.shard(net())
    with torch.inference_mode():
        out = kind.mean(model(kind.batch(0)[0]).mean())
    return out, train(kind, model, sgd(model), range(3)), weights(model)


@situation(strategies=ALL)
def inference_mode_as_the_second_forward(kind: Kind) -> Any:
    model = kind.shard(net())
    optimizer = sgd(model)
    first = train(kind, model, optimizer, range(1))
    with torch.inference_mode():
        out = kind.mean(model(kind.batch(0)[0]).mean())
    return first, out, train(kind, model, optimizer, range(1, 4)), weights(model)


@situation(strategies=ALL)
def no_grad_as_the_first_forward(kind: Kind) -> Any:
    model = kind.shard(net())
    with torch.no_grad():
        out = kind.mean(model(kind.batch(0)[0]).mean())
    return out, train(kind, model, sgd(model), range(3)), weights(model)


@situation(refuses="torch.func|transform")
def vmap_as_the_first_forward(kind: Kind) -> Any:
    model = kind.shard(net())
    out = torch.func.vmap(model)(kind.batch(0)[0])
    return kind.mean(out.mean()), train(kind, model, sgd(model), range(3)), weights(model)


@situation(refuses="torch.func|transform")
def a_gradient_of_the_input_as_the_first_forward(kind: Kind) -> Any:
    model = kind.shard(net())
    grad = torch.func.grad(lambda x: model(x).mean())(kind.batch(0)[0])
    return kind.mean(grad.sum() * (1 if kind.is_plain else 2)).abs() < 1e3, train(kind, model, sgd(model), range(3))


@situation(refuses="torch.func|transform")
def a_forward_derivative_as_the_first_forward(kind: Kind) -> Any:
    model = kind.shard(net())
    features = kind.batch(0)[0]
    out, tangent, *_ = torch.func.jvp(model, (features,), (torch.ones_like(features),))
    return kind.mean(out.mean()), kind.mean(tangent.mean()), train(kind, model, sgd(model), range(3))


def _trained_through(kind: Kind, transform: Any) -> Any:
    model = kind.shard(net())

    def loss_of(model: Any, step: int) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch scripts its rules of forward derivatives
            out: torch.Tensor = transform(model, kind.batch(step)[0])
        return out.square().mean()

    return train(kind, model, kind.watched(sgd(model)), range(3), loss_of), weights(model)


WHOLE = ("no_shard", "optim", "optim_grads")  # weights rest whole, so that a backward may come to them unannounced


@situation(strategies=WHOLE)
def a_loss_of_what_vmap_returns(kind: Kind) -> Any:
    return _trained_through(kind, lambda model, x: torch.func.vmap(model)(x))


@situation(strategies=WHOLE)
def a_loss_of_forward_derivatives(kind: Kind) -> Any:
    return _trained_through(kind, lambda model, x: sum(torch.func.jvp(model, (x,), (torch.ones_like(x),))))


@situation(refuses="torch.func|transform|functional_call")
def a_functional_call_with_the_parameters(kind: Kind) -> Any:
    model = kind.shard(net())
    features, classes = kind.batch(0)

    def loss_of(parameters: Any) -> torch.Tensor:
        out = torch.func.functional_call(model, parameters, (features,))
        return nn.functional.cross_entropy(out, classes)

    return torch.func.grad(loss_of)({name: p.detach() for name, p in model.named_parameters()})


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 7, batch_first=True)
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.lstm(x)[0])
        return out


def _recurrent_loss(kind: Kind) -> Any:
    return lambda model, step: model(kind.tensor(step, 4, 3, 5)).square().mean()


@situation()
def an_lstm_flattens_its_parameters(kind: Kind) -> Any:
    model = seeded(Recurrent)
    kind.shard(model, [model.lstm])
    optimizer = sgd(model)
    losses = train(kind, model, optimizer, range(2), _recurrent_loss(kind))
    model.lstm.flatten_parameters()
    return losses, train(kind, model, optimizer, range(2, 4), _recurrent_loss(kind)), weights(model)


@situation()
def the_fast_path_of_an_encoder_layer_whose_parts_are_units(kind: Kind) -> Any:
    model = seeded(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
    kind.shard(model, [model.self_attn, model.linear1, model.linear2])
    optimizer = sgd(model)
    losses = train(kind, model, optimizer, range(2), lambda m, step: m(kind.tensor(step, 4, 3, 8)).square().mean())
    model.eval()
    with torch.no_grad():
        out = kind.mean(model(kind.tensor(5, 4, 3, 8)).square().mean())
    with torch.inference_mode():
        again = kind.mean(model(kind.tensor(6, 4, 3, 8)).square().mean())
    return losses, out, again


@situation()
def the_fast_path_of_an_encoder_as_one_unit(kind: Kind) -> Any:
    model = seeded(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        )
    )
    kind.shard(model, list(model.layers))
    model.eval()
    with torch.no_grad():
        return kind.mean(model(kind.tensor(5, 4, 3, 8)).square().mean())


def _penalised(kind: Kind) -> Any:
    def loss_of(model: Any, step: int) -> torch.Tensor:
        features, classes = kind.batch(step)
        features = features.clone().requires_grad_()
        out = model(features)
        (slope,) = torch.autograd.grad(out.square().sum(), features, create_graph=True)
        return nn.functional.cross_entropy(out, classes) + slope.square().mean()

    return loss_of


@situation(strategies=("no_shard", "optim_grads", "optim_grads_params"), refuses="create_graph")
def a_gradient_penalty(kind: Kind) -> Any:
    model = kind.shard(net())
    return train(kind, model, sgd(model), range(3), _penalised(kind)), weights(model)


@situation()
def a_list_of_modules_is_one_unit(kind: Kind) -> Any:
    model = net()
    kind.shard_one(list(model.blocks[:2]))
    kind.shard(model, [model.blocks[2]])
    return train(kind, model, sgd(model), range(4)), weights(model)


def _saves_all_but_tanh(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    recomputes = operation is torch.ops.aten.tanh.default
    return CheckpointPolicy.MUST_RECOMPUTE if recomputes else CheckpointPolicy.MUST_SAVE


def _selectively(module: nn.Module, x: torch.Tensor) -> Any:
    contexts = functools.partial(create_selective_checkpoint_contexts, _saves_all_but_tanh)
    return checkpoint(module, x, use_reentrant=False, context_fn=contexts)


def _train_selectively(kind: Kind, *, start: int, of_blocks: bool) -> Any:
    """Train, from step ``start`` on with a selective checkpoint around each unit, or around all of them."""
    model = kind.shard(net())
    optimizer, losses = sgd(model), []
    for step in range(5):
        x, classes = kind.batch(step)
        optimizer.zero_grad()
        if step >= start and of_blocks:
            model.around = _selectively
        out = _selectively(model, x) if step >= start and not of_blocks else model(x)
        loss = nn.functional.cross_entropy(out, classes)
        losses.append(kind.mean(loss))
        loss.backward()
        optimizer.step()
    return losses, weights(model)


@situation(strategies=ALL)
def a_selective_checkpoint_around_all_units_from_the_first_step(kind: Kind) -> Any:
    """What it saves of the engine's own operations is not what runs again: gathers would be left out."""
    return _train_selectively(kind, start=0, of_blocks=False)


@situation(strategies=ALL)
def a_selective_checkpoint_around_all_units_once_a_plan_is_there(kind: Kind) -> Any:
    return _train_selectively(kind, start=3, of_blocks=False)


@situation(strategies=ALL)
def a_selective_checkpoint_around_each_unit(kind: Kind) -> Any:
    return _train_selectively(kind, start=0, of_blocks=True)


class _Informed(nn.Module):
    """A model whose forward differentiates a part of it by its input, as physics-informed losses do."""

    def __init__(self, gradient_of: Any) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
        self.outer = nn.Linear(6, 1)
        self.gradient_of = gradient_of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(x) + self.gradient_of(self.inner, x).square().sum(-1, keepdim=True)
        return out


def _train_informed(kind: Kind, gradient_of: Any) -> Any:
    model = seeded(lambda: _Informed(gradient_of))
    kind.shard(model, [model.inner])
    losses = train(kind, model, sgd(model), range(2), lambda model, step: model(kind.tensor(step, 4, 6)).mean())
    return losses, weights(model)


@situation(refuses=r"torch\.func\.grad, vjp and jacrev of a sharded model, or a part of it")
def a_gradient_of_a_unit_by_its_input_within_forward(kind: Kind) -> Any:
    return _train_informed(kind, lambda unit, x: torch.func.grad(lambda z: unit(z).sum())(x))


@situation()
def a_pullback_of_a_unit_within_forward(kind: Kind) -> Any:
    def pull_back(unit: Any, x: torch.Tensor) -> torch.Tensor:
        out, pull, *_ = torch.func.vjp(unit, x)
        grad: torch.Tensor = pull(torch.ones_like(out))[0]
        return grad

    return _train_informed(kind, pull_back)

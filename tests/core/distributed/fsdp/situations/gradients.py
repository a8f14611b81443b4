"""Microbatches, given-up accumulations, parameters without a gradient, freezing (items 3, 4, 6 and 8)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.core.distributed.fsdp.situations.kinds import Kind, adamw, grads, net, seeded, sgd, train, weights
from tests.core.distributed.fsdp.situations.table import situation

ALL = ("no_shard", "optim", "optim_grads", "optim_grads_params", "hsdp")
SOME = ("optim", "optim_grads_params", "hsdp")


# ---- microbatches ---------------------------------------------------------------------------------------------------


@situation(strategies=ALL)
def microbatches_that_say_only_which_is_last(kind: Kind) -> Any:
    model = kind.shard(net())
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        for index in range(3):
            with kind.microbatch(model, is_last=index == 2):
                kind.loss(model, 3 * step + index).backward()
        optimizer.step()
    return weights(model), grads(model)


@situation(strategies=SOME)
def backwards_that_accumulate_without_a_scope(kind: Kind) -> Any:
    model = kind.shard(net())
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        for index in range(3):
            kind.loss(model, 3 * step + index).backward()
        optimizer.step()
    return weights(model), grads(model)


@situation(strategies=ALL)
def a_loss_with_a_penalty_on_sharded_weights(kind: Kind) -> Any:
    model = kind.shard(net())

    def loss_of(model: Any, step: int) -> torch.Tensor:
        loss = kind.loss(model, step)
        penalty: Any = sum(parameter.abs().sum() + parameter.norm(dim=-1).sum() for parameter in model.parameters())
        return loss + 0.01 * (penalty.full_tensor() if isinstance(penalty, DTensor) else penalty)

    return train(kind, model, adamw(model), range(3), loss_of), weights(model)


@situation(strategies=SOME)
def an_evaluation_between_two_microbatches(kind: Kind) -> Any:
    model = kind.shard(net())
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        with kind.microbatch(model, is_last=False):
            kind.loss(model, 2 * step).backward()
        with torch.no_grad():
            model(kind.batch(step)[0])
        with kind.microbatch(model, is_last=True):
            kind.loss(model, 2 * step + 1).backward()
        optimizer.step()
    return weights(model), grads(model)


def _give_up(kind: Kind, zero_grad: str, *, watched: bool = False) -> Any:
    """Train; begin an accumulation and give it up by ``zero_grad``; train on."""
    model = kind.shard(net())
    optimizer = kind.watched(sgd(model)) if watched else sgd(model)
    train(kind, model, optimizer, range(2))
    with kind.microbatch(model, is_last=False):
        kind.loss(model, 7).backward()
    if zero_grad == "module":
        model.zero_grad()
    elif zero_grad == "keeps":
        optimizer.zero_grad(set_to_none=False)
    else:
        optimizer.zero_grad()
    with kind.microbatch(model, is_last=False):
        kind.loss(model, 2).backward()
    with kind.microbatch(model, is_last=True):
        kind.loss(model, 3).backward()
    optimizer.step()
    return weights(model), grads(model)


@situation(strategies=SOME)
def the_optimizers_zero_grad_ends_an_accumulation(kind: Kind) -> Any:
    return _give_up(kind, "optimizer")


@situation(strategies=SOME)
def a_watched_optimizers_zero_grad_ends_an_accumulation(kind: Kind) -> Any:
    return _give_up(kind, "optimizer", watched=True)


@situation(strategies=SOME)
def the_modules_zero_grad_ends_an_accumulation(kind: Kind) -> Any:
    return _give_up(kind, "module")


@situation(strategies=SOME)
def a_zero_grad_that_keeps_tensors_ends_an_accumulation(kind: Kind) -> Any:
    return _give_up(kind, "keeps")


@situation(strategies=SOME)
def gradients_set_to_none_by_hand_end_an_accumulation(kind: Kind) -> Any:
    model = kind.shard(net())
    optimizer = sgd(model)
    train(kind, model, optimizer, range(2))
    with kind.microbatch(model, is_last=False):
        kind.loss(model, 7).backward()
    for parameter in model.parameters():
        parameter.grad = None
    kind.loss(model, 2).backward()
    optimizer.step()
    return weights(model)


# ---- graphs that are kept --------------------------------------------------------------------------------------------


def _step_against(kind: Kind, model: Any, optimizer: Any, step: int) -> Any:
    """A step on a batch and on the same one moved against its gradient."""
    features, classes = kind.batch(step)
    features = features.clone().requires_grad_()
    loss = nn.functional.cross_entropy(model(features), classes)
    (grad,) = torch.autograd.grad(loss, features, retain_graph=True)
    loss = loss + nn.functional.cross_entropy(model(features.detach() + 0.1 * grad.sign()), classes)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return kind.mean(loss)


@situation()
def a_retained_graph_is_gone_through_again_after_a_further_forward(kind: Kind) -> Any:
    """Adversarial training, from the first step on and after steps without it."""
    losses = []
    for num_before in (0, 2):
        model = kind.shard(net())
        optimizer = sgd(model)
        train(kind, model, optimizer, range(num_before))
        losses.append([_step_against(kind, model, optimizer, num_before + step) for step in range(4)])
        losses.append(train(kind, model, optimizer, range(2)))
    return losses, weights(model), grads(model)


@situation()
def a_retained_backward_and_one_of_the_sum_with_a_further_loss(kind: Kind) -> Any:
    model = kind.shard(net())
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        loss = kind.loss(model, step)
        loss.backward(retain_graph=True)
        (loss + kind.loss(model, step + 1)).backward()
        optimizer.step()
    return weights(model), grads(model)


@situation()
def a_retained_graph_whose_loss_outlives_the_step(kind: Kind) -> Any:
    """Nothing goes through it again."""
    model = kind.shard(net())
    optimizer = sgd(model)
    losses = []
    for step in range(10):
        loss = kind.loss(model, step)
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        losses.append(kind.mean(loss))
        optimizer.step()
    return losses, weights(model)


@situation()
def a_graph_is_kept_over_a_step_of_another_part(kind: Kind) -> Any:
    """As in a GAN under one root: the second part's weights are written between the backwards through the first."""
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 7)))
    kind.shard(model, list(model))
    optimizers = [sgd(part) for part in model]
    losses = []
    for step in range(4):
        out = torch.tanh(model[0](kind.tensor(step, 4, 5)))
        for at, target in ((1, 0.0), (0, 1.0)):
            model.zero_grad()
            loss = (model[1](out) - target).square().mean()
            losses.append(kind.mean(loss))
            loss.backward(retain_graph=at == 1)
            optimizers[at].step()
    return losses, weights(model)


@situation(refuses="whose weights were written meanwhile")
def a_graph_is_kept_over_a_step_of_its_own_weights(kind: Kind) -> Any:
    model = kind.shard(net())
    optimizer = sgd(model)
    train(kind, model, optimizer, range(3))
    loss = kind.loss(model, 3)
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()
    return weights(model)


# ---- parameters without a gradient ----------------------------------------------------------------------------------


class Partial(nn.Module):
    """Layers of which one is never used, one is used as a step says, and one is always."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(5, 5)
        self.never = nn.Linear(5, 5)
        self.sometimes = nn.Linear(5, 5)
        self.extra = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor, sometimes: bool) -> torch.Tensor:
        x = torch.tanh(self.always(x))
        return self.sometimes(x) if sometimes else x


def _train_partial(kind: Kind, units: tuple[str, ...], uses: list[bool]) -> Any:
    torch.manual_seed(3)
    model = Partial()
    kind.shard(model, [model.get_submodule(name) for name in units])
    optimizer = adamw(model)
    for step, used in enumerate(uses):
        optimizer.zero_grad()
        model(kind.tensor(step, 4, 5), used).square().mean().backward()
        optimizer.step()
    return weights(model), grads(model)


@situation(strategies=SOME)
def parameters_of_a_used_unit_without_a_gradient(kind: Kind) -> Any:
    return _train_partial(kind, (), [False, False, False])


@situation(strategies=SOME)
def a_unit_that_is_never_used(kind: Kind) -> Any:
    return _train_partial(kind, ("always", "never", "sometimes"), [True, True, True])


@situation(strategies=SOME)
def a_unit_that_is_used_in_every_other_step(kind: Kind) -> Any:
    return _train_partial(kind, ("always", "never", "sometimes"), [True, False, True, False])


class PerRank(nn.Module):
    """A bias that only the rows of odd ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.odd = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        if x.shape[0] > 4:  # the plain model has all rows
            return torch.cat([out[:4], out[4:] * self.odd])
        import torch.distributed as dist

        return out * self.odd if dist.get_rank() else out


@situation(strategies=SOME)
def a_parameter_that_one_rank_uses(kind: Kind) -> Any:
    torch.manual_seed(3)
    model = kind.shard(PerRank(), [])
    optimizer = adamw(model)
    for step in range(3):
        optimizer.zero_grad()
        model(kind.tensor(step, 4, 5)).square().mean().backward()
        optimizer.step()
    return weights(model), grads(model)


# ---- freezing -------------------------------------------------------------------------------------------------------


def _freeze(model: Any, trainable: bool) -> None:
    model.requires_grad_(trainable)


@situation(strategies=("no_shard", "optim_grads_params"))
def a_unit_is_frozen_between_steps(kind: Kind) -> Any:
    model = kind.shard(net())
    optimizer = adamw(model)
    train(kind, model, optimizer, range(2))
    _freeze(model.blocks[0], False)
    train(kind, model, optimizer, range(2, 5))
    return weights(model), grads(model)


@situation(strategies=("no_shard", "optim_grads_params"))
def gradual_unfreezing(kind: Kind) -> Any:
    model = net()
    for block in model.blocks[:2]:
        _freeze(block, False)
    kind.shard(model)
    optimizer = adamw(model)
    train(kind, model, optimizer, range(2))
    for index in (1, 0):
        _freeze(model.blocks[index], True)
        train(kind, model, optimizer, range(2, 5))
    return weights(model), grads(model)


@situation()
def one_parameter_of_a_unit_is_frozen(kind: Kind) -> Any:
    model = kind.shard(net())
    optimizer = adamw(model)
    train(kind, model, optimizer, range(2))
    model.blocks[0].up.weight.requires_grad_(False)
    train(kind, model, optimizer, range(2, 5))
    return weights(model), grads(model)


@situation()
def two_halves_take_turns_as_in_a_gan(kind: Kind) -> Any:
    model = kind.shard(net(4))
    halves = (model.blocks[:2], model.blocks[2:])
    optimizers = [sgd(half) for half in halves]
    losses = []
    for step in range(6):
        for index, half in enumerate(halves):
            _freeze(half, index == step % 2)
        losses += train(kind, model, optimizers[step % 2], range(step, step + 1))
    return losses, weights(model)


@situation(refuses="adapter")
def a_parameter_is_added_to_a_unit(kind: Kind) -> Any:
    model = kind.shard(net())
    train(kind, model, sgd(model), range(2))
    block = model.blocks[0]
    block.adapter = nn.Parameter(torch.ones(7))
    block.register_forward_hook(lambda module, _, out: out * module.adapter)
    optimizer = sgd(model)
    return train(kind, model, optimizer, range(2, 4)), weights(model)

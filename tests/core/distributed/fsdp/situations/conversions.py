"""Conversions of a part, meta initialisation, names and placements of tensors (items 7, 16 and 17)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.core.distributed.fsdp.situations.kinds import Kind, adamw, grads, net, seeded, sgd, train, weights
from tests.core.distributed.fsdp.situations.table import situation


def _convert(kind: Kind, convert: Any) -> Any:
    """Train, convert with the optimizer in place, train on."""
    model = kind.shard(net())
    optimizer = adamw(model)
    train(kind, model, optimizer, range(2))
    convert(model)
    return train(kind, model, optimizer, range(2, 5)), weights(model), grads(model)


@situation()
def float_of_a_unit(kind: Kind) -> Any:
    return _convert(kind, lambda model: model.blocks[0].float())


@situation()
def float_of_a_layer_in_a_unit(kind: Kind) -> Any:
    return _convert(kind, lambda model: model.blocks[0].up.float())


@situation()
def cpu_of_a_layer_of_the_root(kind: Kind) -> Any:
    return _convert(kind, lambda model: model.head.cpu())


@situation(refuses="convert|fully_shard")
def double_of_a_layer_in_a_unit(kind: Kind) -> Any:
    def convert(model: Any) -> None:
        model.blocks[0].up.double()
        model.blocks[0].up.register_forward_pre_hook(lambda _, args: (args[0].double(),))
        model.blocks[0].up.register_forward_hook(lambda _, __, out: out.float())

    return _convert(kind, convert)


@situation()
def an_applied_clone_below_a_unit(kind: Kind) -> Any:
    return _convert(kind, lambda model: model.blocks[0].up._apply(lambda t: t.clone()))


@situation()
def an_applied_scaling_of_the_model(kind: Kind) -> Any:
    return _convert(kind, lambda model: model._apply(lambda t: t * 0.5))


@situation()
def to_empty_of_a_unit_and_new_values(kind: Kind) -> Any:
    def convert(model: Any) -> None:
        model.blocks[0].to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.blocks[0].parameters():
                parameter.fill_(0.1)

    return _convert(kind, convert)


# ---- meta device ----------------------------------------------------------------------------------------------------


def _from_meta(kind: Kind, build: Any, units: Any = lambda model: ()) -> Any:
    """Build on the meta device, shard, initialise as each library has it; the plain model is built as usual."""
    if kind.is_plain:
        return seeded(build)
    with torch.device("meta"):
        model = build()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind.shard(model, units(model))
        if kind.name == "fsdp2":
            model.to_empty(device="cpu")
            for module in model.modules():
                reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
                if reset is not None:
                    reset()
    return model


@situation()
def a_meta_model_of_linear_layers_has_the_plain_values(kind: Kind) -> Any:
    return weights(_from_meta(kind, lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))))


@situation()
def a_meta_model_with_units_has_the_plain_values(kind: Kind) -> Any:
    return weights(
        _from_meta(kind, lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), lambda m: [m[0], m[2]])
    )


@situation()
def a_meta_model_with_attention_trains(kind: Kind) -> Any:
    model = _from_meta(kind, lambda: Attention(6))
    model(kind.tensor(0, 4, 3, 6)).square().mean().backward()
    return [float(p.abs().max() if kind.is_plain else p.full_tensor().abs().max()) < 10 for p in model.parameters()]


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.attention(x, x, x, need_weights=False)[0])
        return out


class OwnInit(nn.Module):
    """A model whose own initialisation is none of its layers': as Hugging Face's ``_init_weights``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return out


@situation(refuses="init_fn|initial")
def a_meta_model_with_an_initialisation_of_its_own(kind: Kind) -> Any:
    return weights(_from_meta(kind, OwnInit))


@situation()
def constants_written_after_sharding_a_meta_model(kind: Kind) -> Any:
    model = _from_meta(kind, lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.25)
    return weights(model)


@situation()
def random_values_drawn_after_sharding(kind: Kind) -> Any:
    model = kind.shard(net())
    torch.manual_seed(5)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return weights(model)


# ---- optimizers and placements --------------------------------------------------------------------------------------


@situation()
def an_optimizer_is_watched_twice(kind: Kind) -> Any:
    model = kind.shard(net())
    optimizer = kind.watched(kind.watched(sgd(model)))
    losses = train(kind, model, optimizer, range(3))
    optimizer.zero_grad()
    return losses, weights(model), grads(model)


@situation()
def an_optimizer_is_watched_after_its_zero_grad_was_wrapped(kind: Kind) -> Any:
    model = kind.shard(net())
    optimizer = sgd(model)
    called: list[str] = []
    zero_grad, step = optimizer.zero_grad, optimizer.step

    def own_zero_grad(*args: Any, **kwargs: Any) -> None:
        called.append("zero_grad")
        zero_grad(*args, **kwargs)

    def own_step(*args: Any, **kwargs: Any) -> Any:
        called.append("step")
        return step(*args, **kwargs)

    optimizer.zero_grad, optimizer.step = own_zero_grad, own_step  # type: ignore[method-assign]
    kind.watched(optimizer)
    losses = train(kind, model, optimizer, range(3))
    return losses, called, weights(model)


@situation()
def an_optimizer_under_a_rate_schedule_is_watched(kind: Kind) -> Any:
    model = kind.shard(net())
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    kind.watched(optimizer)
    losses = []
    for step in range(3):
        losses += train(kind, model, optimizer, range(step, step + 1))
        schedule.step()
    return losses, weights(model)


@situation(refuses=r"shape=p\.shape")
def from_local_gives_the_shape_back(kind: Kind) -> Any:
    model = kind.shard(net())
    if kind.is_plain:
        return weights(model), {name: list(p.shape) for name, p in weights(model).items()}
    again = {name: DTensor.from_local(p.to_local(), p.device_mesh, p.placements) for name, p in weights(model).items()}
    return again, {name: list(p.shape) for name, p in again.items()}


@situation()
def from_local_with_a_shape(kind: Kind) -> Any:
    model = kind.shard(net())
    if kind.is_plain:
        return weights(model)
    return {
        name: DTensor.from_local(
            p.to_local(),
            p.device_mesh,
            p.placements,
            run_check=False,
            shape=p.shape,
            stride=p.stride(),
        )
        for name, p in weights(model).items()
    }


@situation()
def norms_and_sums_of_uneven_rows(kind: Kind) -> Any:
    model = kind.shard(net())
    kind.loss(model, 0).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert dist.is_initialized()
    return norm, grads(model), [p.detach().sum() for p in model.parameters()]

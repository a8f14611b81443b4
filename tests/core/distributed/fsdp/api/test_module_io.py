"""Inputs and outputs of units: dicts, dataclasses, objects, nothing differentiable, their own input, views."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.agreement import assert_trains_alike, groups_of, inputs, seeded, shard
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


@dataclass
class Record:
    value: torch.Tensor
    note: str = "a note"
    inner: Any = None


@dataclass(slots=True)
class SlotRecord:
    """An object without a ``__dict__``."""

    value: torch.Tensor


class Carrier:
    """An object that is neither a container nor a dataclass."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


Pair = namedtuple("Pair", ["left", "right"])

# How a unit packs its output, and how the model takes it out again.
PACKINGS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "dict": (lambda y: {"y": y, "n": 3}, lambda out: out["y"]),
    "nested": (lambda y: ([{"deep": (y, None)}], "text"), lambda out: out[0][0]["deep"][0]),
    "dataclass": (lambda y: Record(y), lambda out: out.value),
    "dataclass in dataclass": (lambda y: Record(y.detach(), inner=Record(y)), lambda out: out.inner.value),
    "dataclass with slots": (lambda y: SlotRecord(y), lambda out: out.value),
    "object": (lambda y: Carrier(y), lambda out: out.value),
    "named tuple": (lambda y: Pair(y, None), lambda out: out.left),
    "set": (lambda y: {y}, lambda out: next(iter(out))),
    "two outputs, one unused": (lambda y: (y, y * 2), lambda out: out[0]),
    "two outputs, both used": (lambda y: (y, y.sin()), lambda out: out[0] * out[1]),
}

# What the model does with a unit's output before the next one sees it.
AFTERWARDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu_": lambda y: y.relu_(),
    "scaled in place": lambda y: y.mul_(1.5).add_(0.1),
    "a view in place": lambda y: (y[:, :2].add_(1.0), y)[1],
    "a slice only": lambda y: torch.cat([y[:, :3], y[:, :2].detach()], dim=1),
    "transposed in place": lambda y: y.t_().t(),
}


class Unit(nn.Module):
    def __init__(self, pack: Callable[[torch.Tensor], Any] = lambda y: y) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.pack = pack

    def forward(self, x: torch.Tensor) -> Any:
        return self.pack(self.linear(x))


class Chain(nn.Module):
    """Three units with something between them."""

    def __init__(
        self,
        pack: Callable[[torch.Tensor], Any] = lambda y: y,
        take: Callable[[Any], torch.Tensor] = lambda out: out,
        afterwards: Callable[[torch.Tensor], torch.Tensor] = torch.tanh,
    ) -> None:
        super().__init__()
        self.units = nn.ModuleList(Unit(pack) for _ in range(3))
        self.take, self.afterwards = take, afterwards

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for unit in self.units:
            x = self.afterwards(self.take(unit(x)))
        return x


UNITS = ("units.0", "units.1", "units.2")


def _loss(model: Any, rank: int, step: int) -> torch.Tensor:
    out: torch.Tensor = model(inputs(rank, step, 3, 5))
    return out.square().mean()


@CHECKS.on(2)
def outputs_of_any_structure() -> None:
    for pack, take in PACKINGS.values():
        assert_trains_alike(lambda p=pack, t=take: Chain(p, t), lambda m: shard(m, UNITS), _loss)  # type: ignore[misc]


@CHECKS.on(1, 2)
def operations_in_place_on_an_output() -> None:
    for afterwards in AFTERWARDS.values():
        assert_trains_alike(lambda a=afterwards: Chain(afterwards=a), lambda m: shard(m, UNITS), _loss)  # type: ignore[misc]


class Keywords(nn.Module):
    """Takes keyword arguments only, with tensors nested in a dict and a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = KeywordUnit(), KeywordUnit()

    def forward(self, *, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        x = self.first(hidden={"x": batch["x"]}, record=Record(batch["x"]), flag=True)
        return {"out": self.second(hidden={"x": x}, record=Record(x), flag=False)}


class KeywordUnit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, *, hidden: dict[str, torch.Tensor], record: Record, flag: bool) -> torch.Tensor:
        out: torch.Tensor = self.linear(hidden["x"]) + record.value
        return torch.tanh(out) if flag else out


@CHECKS.on(2)
def calls_by_keywords_alone() -> None:
    assert_trains_alike(
        Keywords,
        lambda m: shard(m, ("first", "second")),
        lambda model, rank, step: model(batch={"x": inputs(rank, step, 3, 5)})["out"].square().mean(),
    )


class PassesOn(nn.Module):
    """Units that return their input, alone or beside another output."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([Beside(), Same(), Beside()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, y = self.units[0](x)
        y = self.units[1](y)
        y, z = self.units[2](y)
        return x.sum() + y.sin() + z


class Beside(Unit):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, torch.tanh(self.linear(x))


class Same(Unit):
    """Uses its weights only in what is not differentiated."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.linear(x).detach()
        return x


@CHECKS.on(2)
def an_output_that_is_an_input() -> None:
    model = assert_trains_alike(PassesOn, lambda m: shard(m, UNITS), _loss)
    assert model.units[1].seen.shape == (3, 5)


class Undifferentiable(nn.Module):
    """A unit that returns an index, one under no_grad, one whose output is detached, then one that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([Unit(lambda y: y.argmax(dim=1)), Unit(), Unit(lambda y: y.detach()), Unit()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = self.units[0](x)
        with torch.no_grad():
            gate = self.units[1](x)
        target = self.units[2](x)
        out: torch.Tensor = self.units[3](x) * gate - target
        return out + index.view(-1, 1)


@CHECKS.on(2)
def outputs_that_no_gradient_comes_through() -> None:
    model = assert_trains_alike(Undifferentiable, lambda m: shard(m, (*UNITS, "units.3")), _loss)
    assert all(unit.linear.weight.grad is None for unit in list(model.units)[:3])


@CHECKS.on(2)
def outputs_that_hold_themselves_or_a_module_are_searched_once() -> None:
    """The search for tensors ends whatever an output refers to."""

    class Loop:
        def __init__(self, value: torch.Tensor, module: nn.Module) -> None:
            self.value, self.me, self.module = value, self, module

    model = shard(seeded(lambda: Chain(lambda y: y, lambda out: out)), UNITS)
    model.units[0].pack = lambda y: Loop(y, model)
    model.take = lambda out: out.value if isinstance(out, Loop) else out
    _loss(model, 0, 0).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not any(group.weights.is_unsharded for group in groups_of(model))


@CHECKS.on(2)
def inputs_that_need_a_gradient_get_it() -> None:
    plain, model = seeded(Chain), seeded(Chain)
    shard(model, UNITS)
    gradients = []
    for chain in (plain, model):
        x = inputs(0, 0, 3, 5).requires_grad_()
        chain(x).square().mean().backward()
        gradients.append(x.grad)
    assert gradients[0] is not None and gradients[1] is not None
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)

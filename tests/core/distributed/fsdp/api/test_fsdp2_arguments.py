"""``fully_shard`` as FSDP2's users call it, and units of one context without a root."""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict, deque
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp import fully_shard, fully_shard_context, fully_shard_optimizer
from megatron.core.distributed.fsdp.api.module import topmost_fsdp_modules
from tests.support.agreement import assert_trains_alike, groups_of, inputs
from tests.support.models import STRATEGY_NAMES
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))


def _loss(model: Any, rank: int, step: int) -> torch.Tensor:
    return model(inputs(rank, step, 3, 5)).square().mean()


@CHECKS.on(2)
def keywords_of_fsdp2_mean_the_same() -> None:
    reduce_wide = fsdp2.MixedPrecisionPolicy(reduce_dtype=torch.float32)
    flat = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    deep = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 1))
    calls: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
        ({"mesh": flat}, ("S", "S", "S")),
        ({"mesh": flat, "reshard_after_forward": True}, ("S", "S", "S")),
        ({"mesh": flat, "reshard_after_forward": False}, ("R", "S", "S")),
        ({"mesh": flat, "placements": "optim"}, ("R", "P", "S")),
        ({"placements": "optim_grads_params", "mp_policy": reduce_wide}, ("S", "S", "S")),
        ({"mixed_precision_policy": reduce_wide, "offload_policy": fsdp2.OffloadPolicy()}, ("S", "S", "S")),
        ({"ignored_params": set(), "shard_placement_fn": None}, ("S", "S", "S")),
    )
    for arguments, kinds in calls:

        def wrap(model: Any, arguments: dict[str, Any] = arguments) -> Any:
            fully_shard(model[0], **arguments)
            return fully_shard(model, **arguments)

        model = assert_trains_alike(_net, wrap, _loss)
        (group,) = model[0].parameter_groups
        placed = (group.placements.parameter, group.placements.gradient, group.placements.optimizer)
        assert tuple(type(of_kind[0]).__name__[0] for of_kind in placed) == kinds, arguments
    model = assert_trains_alike(_net, lambda m: fully_shard(m, mesh=deep, reshard_after_forward=False), _loss)
    assert [type(p).__name__ for p in model.parameter_groups[0].placements.parameter] == ["Replicate", "Replicate"]


class Mixed(nn.Module):
    """Layers, of which one is frozen, whose inputs come in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)
        self.register_buffer("gain", torch.full((5,), 1.001))
        self.first.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor, *, more: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        x = self.norm(torch.tanh(self.first(x)) * self.get_buffer("gain").to(x.dtype))
        return {"out": self.last(x) + more["shift"] * more["times"]}


@CHECKS.on(2)
def a_policy_of_fsdp2_trains_as_there() -> None:
    """bf16 compute from fp32 parameters, which keep their whole values; also once a frozen one is trained."""
    bf16, fp32 = torch.bfloat16, torch.float32
    policies = (
        fsdp2.MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32),
        fsdp2.MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32, output_dtype=fp32),
        fsdp2.MixedPrecisionPolicy(param_dtype=bf16, output_dtype=torch.float64),
        fsdp2.MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32, cast_forward_inputs=False),
    )
    x = inputs(dist.get_rank(), 0, 4, 6)
    for policy in policies:
        expected = _trained(fsdp2.fully_shard, policy, x)
        # Sums that travel in bf16 are rounded before they are scaled here, and after it there.
        tolerance = 1e-6 if policy.reduce_dtype is fp32 else 0.02
        for strategy in STRATEGY_NAMES:
            wrap = functools.partial(fully_shard, placements=strategy)
            for got, wanted in zip(_trained(wrap, policy, x), expected, strict=True):
                assert got.dtype == wanted.dtype, (policy, strategy)
                torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def _trained(wrap: Any, policy: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Outputs, gradients and weights of some steps, and weights before the first one."""
    torch.manual_seed(3)
    model: Any = Mixed()
    wrap(model.last, mp_policy=policy)
    wrap(model, mp_policy=policy)
    found = [parameter.full_tensor().detach().clone() for parameter in model.parameters()]
    if not policy.cast_forward_inputs:
        x = x.to(policy.param_dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        more = {"shift": x[:, :3], "times": torch.tensor(step)}
        out = model(x, more=more)["out"]
        out.float().square().mean().backward()
        found += [out.detach(), *(p.grad.full_tensor() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            model.first.weight.requires_grad_(True)
    return found + [parameter.full_tensor().detach() for parameter in model.parameters()]


@dataclasses.dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    rest: Any = None


@dataclasses.dataclass
class Scaled:
    x: torch.Tensor
    made: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.x = self.made = self.x * 2


class Mine(dict[str, Any]):
    def __init__(self, note: str, **entries: Any) -> None:
        super().__init__(**entries)
        self.note = note


class Items(list[Any]):
    pass


class Pair(NamedTuple):
    left: Any
    right: Any


class PassesOn(nn.Module):
    """Notes what it gets, and returns such a tree of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = args, kwargs
        return self.linear(torch.ones(1, 2, dtype=torch.bfloat16)), self.make()

    make: Any = None


CONTAINERS: dict[str, tuple[Any, Any]] = {
    "dataclass": (Batch, lambda b: [b.x]),
    "in a dataclass in a list": (lambda x: [Batch(x.int(), rest=[Batch(x)])], lambda v: [v[0].x, v[0].rest[0].x]),
    "dict": (lambda x: {"x": x, "y": x.int()}, lambda d: [*d.values()]),
    "dict of a class": (lambda x: Mine("note", x=x), lambda d: [d["x"]]),
    "OrderedDict": (lambda x: OrderedDict(x=x), lambda d: [d["x"]]),
    "list of a class": (lambda x: Items([x, None]), lambda v: v[:1]),
    "named tuple": (lambda x: Pair(x, [x]), lambda p: [p.left, *p.right]),
    "set": (lambda x: {x}, lambda v: [*v]),
    "result of an operator": (lambda x: x.max(dim=1), lambda v: [v.values, v.indices]),
    "packed sequence": (lambda x: nn.utils.rnn.pack_sequence([x]), lambda p: [p.data]),
    "deque": (lambda x: deque([x]), lambda v: [*v]),
}


@CHECKS.on(2)
def containers_are_cast_as_in_fsdp2() -> None:
    """Inputs by position and by name, and outputs."""
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    models = [PassesOn(), PassesOn()]
    fully_shard(models[0], mp_policy=policy)
    fsdp2.fully_shard(models[1], mp_policy=policy)
    for what, (make, tensors) in CONTAINERS.items():
        found = []
        for model in models:
            model.make = lambda make=make: make(torch.ones(2, 2))
            _, out = model(make(torch.ones(2, 2)), by_name=make(torch.ones(2, 2)))
            (first,), kwargs = model.seen
            trees = [*map(tensors, (first, kwargs["by_name"], out))]
            assert all(torch.equal(t.float(), torch.ones_like(t).float() * t.bool()) for tree in trees for t in tree)
            found.append([[t.dtype for t in tree] for tree in trees])
        assert found[0] == found[1], (what, found)
    mine, scaled, listed = Mine("note", x=torch.ones(2)), Scaled(torch.ones(2)), [torch.ones(2, dtype=torch.bfloat16)]
    models[0](mine, scaled, listed, Items([torch.ones(2)]))
    got = models[0].seen[0]
    assert (type(got[0]), got[0].note, mine["x"].dtype) == (Mine, "note", torch.float32)
    assert (got[1].x.tolist(), got[1].made.dtype) == ([2.0, 2.0], torch.bfloat16), "__post_init__ has run once"
    assert got[2] is listed, "what needs no cast stays the caller's"
    assert type(got[3]) is Items


@CHECKS.on(2)
def the_least_memory_changes_no_number() -> None:
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for strategy in STRATEGY_NAMES:
        found = [_steps(strategy, policy, least_memory=least) for least in (False, None)]
        for (_, states), (_, expected) in zip(found[1:], found[:1], strict=True):
            assert all(map(torch.equal, states, expected)), strategy
        (own, _), (least, _) = found
        numel = sum(group.weights.main.local.numel() for group in groups_of(own))
        reports = [topmost_fsdp_modules(model)[0]._fsdp_unit.context.describe() for model in (own, least)]
        largest = max(group.grads.input.storage.nbytes for group in groups_of(least))
        assert not any(group.grads.input.storage.allocated for group in groups_of(least))
        planner = topmost_fsdp_modules(least)[0]._fsdp_unit.context.planner
        assert planner.plan is not None and not planner.arenas, strategy
        storages = [storage for group in groups_of(least) if (storage := group.weights.full_storage) is not None]
        assert bool(storages) == (strategy not in ("no_shard", "optim", "optim_grads")), strategy
        assert not any(storage.flat.untyped_storage().nbytes() for storage in storages), strategy
        assert reports[1].reduce_scatter_inputs == 0 and reports[1].largest_input == largest, strategy
        if strategy in ("optim_grads_params", "hsdp"):
            assert (reports[0].model_weights, reports[1].model_weights) == (2 * numel, 0), strategy
            assert "one reduce-scatter input" in str(reports[1]) and "model weights" not in str(reports[1])
    _memory_is_given_back_within_a_step(policy)
    with pytest.raises(ValueError, match="least_memory=True goes with transport 'nccl' alone, got 'peer_copy'"):
        fully_shard(_net(), transport="peer_copy", least_memory=True)


def _memory_is_given_back_within_a_step(policy: Any) -> None:
    """All layers but the last hold no memory while there are logits, nor does any unit while the last gradients are reduced."""
    net: Any = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 5))
    for layer in net[:4]:
        fully_shard(layer, mp_policy=policy)
    fully_shard(net, mp_policy=policy)
    groups = [module._fsdp_unit.own_groups[0] for module in (*net[:4], net)]
    group = groups[0]
    found: dict[str, list[bool]] = {}

    def look(when: str) -> None:
        found[when] = [bool(group.weights.full_storage.flat.untyped_storage().nbytes()) for group in groups]

    copy_in = group.grads.copy_in
    group.grads.copy_in = lambda: (look("reduction"), copy_in())
    for _ in range(4):
        out = net(torch.ones(2, 6)).float()
        look("turn")
        out.square().sum().backward()
        look("end")
    assert found["turn"] == [False, False, False, True, True], "the last layer and the root, with which backward begins"
    assert found["reduction"] == found["end"] == [False] * 5


@CHECKS.on(2)
def sums_over_microbatches_are_as_wide_as_what_travels() -> None:
    """As in FSDP2: bf16 sums of many microbatches lose what the user asked fp32 reductions for."""
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()
    for strategy in STRATEGY_NAMES:
        for least_memory in (False, None):
            torch.manual_seed(0)
            net: Any = fully_shard(
                nn.Linear(7, 13).bfloat16(), placements=strategy, mp_policy=policy, least_memory=least_memory
            )

            def grads(num: int, *, given_up: bool = False, net: Any = net) -> list[torch.Tensor]:
                net.zero_grad()
                for index in range(num):
                    net.set_requires_gradient_sync(index == num - 1)
                    (net(x).float().square().mean() / num).backward()
                    if given_up and index == num // 2 - 1:
                        net.bias.grad = None
                return [parameter.grad.full_tensor().clone() for parameter in net.parameters()]

            once, often, some = grads(1), grads(64), grads(64, given_up=True)
            assert all(map(torch.equal, often, once)), strategy
            assert torch.equal(some[0], once[0]) and torch.equal(some[1], once[1] / 2), strategy
            for _ in range(2):  # onto what param.grad holds
                net.set_requires_gradient_sync(_ == 1)
                (net(x).float().square().mean() / 2).backward()
            assert torch.equal(net.weight.grad.full_tensor(), 2 * once[0]), strategy
            assert not any(sums.allocated for group in groups_of(net) if (sums := group.grads.accumulator.storage))


def _steps(strategy: str, policy: Any, *, least_memory: bool | None) -> tuple[Any, list[torch.Tensor]]:
    """Train with two microbatches, weights written by hand, an evaluation and a load; return losses, gradients and weights."""
    torch.manual_seed(3)
    net: Any = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)))
    for layer in net:
        fully_shard(layer, placements=strategy, mp_policy=policy, least_memory=least_memory)
    fully_shard(net, placements=strategy, mp_policy=policy, least_memory=least_memory)
    optimizer = fully_shard_optimizer(torch.optim.Adam(net.parameters(), lr=0.1))
    found: list[torch.Tensor] = []
    for step in range(4):
        for microbatch in range(2):
            net.set_requires_gradient_sync(microbatch == 1)
            loss = _loss(net, dist.get_rank(), 2 * step + microbatch)
            loss.backward()
            found.append(loss.detach())
        found += [parameter.grad.full_tensor() for parameter in net.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            if step == 1:
                net[1][0].weight.mul_(1.5)
            found.append(_loss(net, dist.get_rank(), 100 + step))
            if step == 2:
                net.load_state_dict({name: value * 0.5 for name, value in net.state_dict().items()})
    return net, [*found, *(parameter.full_tensor().detach() for parameter in net.parameters())]


class Chunked(nn.Module):
    """A norm and a head that are one unit; the head runs once for each chunk, after the layers around the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = self.norm(x)
        return torch.cat([self.head(chunk) for chunk in x.chunk(3)])


@CHECKS.on(2)
def several_modules_are_one_unit() -> None:
    for strategy in STRATEGY_NAMES:
        for around in (False, True):

            def wrap(model: Any, strategy: str = strategy, around: bool = around) -> Any:
                if around:
                    given = [model.norm, model.head]
                    assert fully_shard(given, placements=strategy) is given
                    fully_shard(list(model.layers), placements=strategy)
                else:
                    fully_shard([*model.layers, model.norm, model.head], placements=strategy)
                return fully_shard(model, placements=strategy)

            for num_microbatches in (1, 2):
                model = assert_trains_alike(Chunked, wrap, _loss, num_microbatches=num_microbatches)
            assert model.norm._fsdp_unit is model.head._fsdp_unit
            assert len(groups_of(model)) == len({*groups_of(model)}) <= 4
            assert model.norm._fsdp_unit.name == ("[norm, head]" if around else "[layers.0, layers.1, norm, head]")
            model.head.unshard()
            assert not isinstance(model.norm.weight, DTensor)
            model.norm.reshard()
            assert isinstance(model.head.weight, DTensor)
            model.norm.float()
            assert list(model.state_dict()) == list(Chunked().state_dict())
    for modules, message in (([], "got none"), ([nn.Linear(2, 2)] * 2, "got a Linear twice")):
        with pytest.raises(
            ValueError, match=f"fully_shard of a list needs modules that do not hold each other, {message}"
        ):
            fully_shard(modules)
    net = _net()
    with pytest.raises(ValueError, match="got a Linear twice, or inside of another one"):
        fully_shard([net, net[0]])
    with pytest.raises(TypeError, match="fully_shard needs a module, or a list of modules, got 3"):
        fully_shard([3])  # type: ignore[type-var]


@CHECKS.on(2)
def units_of_a_shared_context_have_names_of_their_own() -> None:
    model = _net()
    with fully_shard_context() as context:
        fully_shard(model[0])
        fully_shard(model[2])
        whole = _net()
        fully_shard(whole[2])
        fully_shard(whole)
    names = ["Linear_0", "Linear_1", "Sequential_3.2", "Sequential_3"]
    assert [unit.name for unit in context.units] == names
    assert [unit.forward_range.own for unit in context.units] == [f"fsdp.forward {name}" for name in names]
    assert [group.name_of(0) for group in context.groups] == [
        "Linear_0.weight",
        "Linear_1.weight",
        "Sequential_3.2.weight",
        "Sequential_3.0.weight",
    ]
    for step in range(3):
        (_loss(model, dist.get_rank(), step) + _loss(whole, dist.get_rank(), step)).backward()
    model[0].weight = nn.Parameter(torch.ones(5, 5))
    with pytest.raises(RuntimeError, match=r"Linear_0\.weight must stay the parameter"):
        _loss(model, 0, 0)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)

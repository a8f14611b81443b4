"""``torch.compile`` around the engine: whatever is compiled comes out as the unsharded model does."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.distributed.fsdp.huggingface import fully_shard_pretrained
from tests.core.distributed.fsdp.situations.kinds import ZERO3, Kind, net
from tests.core.distributed.fsdp.situations.table import COMPILED, situations, verdicts
from tests.support.launch import run_ranks


@pytest.mark.parametrize("name", situations(COMPILED))
def test_ours_is_right(name: str) -> None:
    verdicts("ours", COMPILED)[name].assert_serves(situations(COMPILED)[name])


class Chain(nn.Module):
    """Two units and a layer of the root, called one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Part(), Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x + self.attention(x))


class HubModel(nn.Module):
    """What ``fully_shard_pretrained`` asks of a model; its units have modules inside that are no units."""

    _no_split_modules = ("Layer",)
    config = None

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def initialize_weights(self) -> None:
        raise AssertionError("it has values")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _shard_hub_model(kind: Kind, model: HubModel, units: Any) -> None:
    if kind.name == "ours":
        fully_shard_pretrained(model)
        assert all(module._is_fsdp_managed_module for module in model.modules())  # what transformers asks
    else:
        kind.shard(model, units)


def _count(kind: Kind, model: Any, units: Any) -> tuple[int, ...]:
    """Graphs, operations in them and graph breaks of the compiled model, then of its compiled units."""
    from torch._dynamo.utils import counters

    if isinstance(model, HubModel):
        _shard_hub_model(kind, model, units)
    else:
        kind.shard(model, units)
    torch._dynamo.reset()
    counters.clear()
    explained = torch._dynamo.explain(model)(torch.ones(4, 5))
    breaks = sum(counters["graph_break"].values())
    torch._dynamo.reset()
    counters.clear()
    for unit in units:
        unit.compile(backend="eager")
    model(torch.ones(4, 5)).sum().backward()
    of_units = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return explained.graph_count, explained.op_count, breaks, *of_units


def _counts(name: str) -> list[tuple[int, ...]]:
    warnings.simplefilter("ignore")  # dynamo asks tensors that are no leaves for their gradient
    kind = Kind(name=name, strategy=ZERO3, folder="")
    model, chain, hub = net(), Chain(), HubModel()
    cases: list[tuple[Any, Any]] = [(model, model.blocks), (chain, [chain.first, chain.second]), (hub, hub.layers)]
    return [_count(kind, case, list(units)) for case, units in cases]


def test_graphs_break_no_more_often_than_around_fsdp2() -> None:
    ours, theirs = (run_ranks(1, _counts, name)[0] for name in ("ours", "fsdp2"))
    assert ours == theirs


class _Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if self.training else self.linear(x) + 100.0


def _follows_its_mode() -> None:
    warnings.simplefilter("ignore")
    model = nn.Sequential(_Dropped())
    Kind(name="ours", strategy=ZERO3, folder="").shard(model, [model[0]])
    model[0].compile(backend="eager")
    assert all(module._is_fsdp_managed_module for module in (model, model[0]))
    trained = model(torch.ones(4, 5)).detach()
    model.eval()
    torch.testing.assert_close(model(torch.ones(4, 5)).detach(), trained + 100.0)
    model.train()
    torch.testing.assert_close(model(torch.ones(4, 5)).detach(), trained)


def test_a_compiled_unit_follows_its_mode() -> None:
    """Also where transformers is told that the module is sharded, which torch.compile takes as leave to watch nothing."""
    run_ranks(1, _follows_its_mode)

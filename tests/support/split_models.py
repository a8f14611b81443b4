"""A model whose parameters are split in every way by hand, and what its gradients must be, computed without any group.

The loss is linear in the weights: the gradient of a parameter on a rank is a tensor that follows from the parameter's
name, the ranks's place and the microbatch. So whatever the engine sums, drops, doubles or scales shows in a number.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import FullyShardedDataParallel
from megatron.core.module_names import ModuleListPart, named_parameters
from megatron.core.process_group_builder import build_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rank_grid import RankGrid
from megatron.core.tensor_parallel.partition import assemble, partition

NUM_LAYERS, NUM_EXPERTS = 2, 4
EMBEDDING = "embedding.weight"


@dataclass(frozen=True)
class Layout:
    """Degrees of a run, whose ranks are the world's."""

    tp: int = 1
    ep: int = 1
    pp: int = 1
    expt_tp: int | None = None
    instances: int = 1
    strategy: str = "optim_grads_params"
    outer: str = "no_shard"
    sums: bool = False

    @cached_property
    def grid(self) -> RankGrid:
        return RankGrid(
            world_size=dist.get_world_size(),
            tensor_model_parallel_size=self.tp,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=self.expt_tp,
            pipeline_model_parallel_size=self.pp,
            num_distributed_optimizer_instances=self.instances,
        )


@dataclass(frozen=True)
class Spec:
    """A parameter of the whole model."""

    name: str
    shape: tuple[int, ...]
    stage: int
    partition_dim: int | None = None
    stride: int = 1
    expert: int | None = None
    sequence_parallel: bool = False
    is_shared: bool = False

    @property
    def attributes(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.partition_dim is not None:
            found |= {
                "tensor_model_parallel": True,
                "partition_dim": self.partition_dim,
                "partition_stride": self.stride,
            }
        if self.expert is not None:
            found["allreduce"] = False
        if self.sequence_parallel:
            found["sequence_parallel"] = True
        if self.is_shared:
            found["shared_embedding"] = True
        return found


@cache
def specs(layout: Layout) -> list[Spec]:
    """All parameters of the model, each once."""
    found = [Spec(EMBEDDING, (12, 3), 0, partition_dim=0, is_shared=True)]
    for index in range(NUM_LAYERS):
        stage, layer = index * layout.pp // NUM_LAYERS, f"layers.{index}"
        found += [
            Spec(f"{layer}.norm", (7,), stage, sequence_parallel=True),
            Spec(f"{layer}.fc1", (24, 3), stage, partition_dim=0, stride=2),
            Spec(f"{layer}.fc1_bias", (24,), stage, partition_dim=0, stride=2),
            Spec(f"{layer}.fc2", (5, 12), stage, partition_dim=1),
            Spec(f"{layer}.fc2_bias", (5,), stage, sequence_parallel=True),
            Spec(f"{layer}.scale", (), stage),
        ]
        for expert in range(NUM_EXPERTS):
            prefix = f"{layer}.experts.{expert}"
            found.append(Spec(f"{prefix}.weight", (12, 5), stage, partition_dim=0, expert=expert))
            found.append(Spec(f"{prefix}.bias", (3,), stage, expert=expert))
    return found


@dataclass(frozen=True)
class Place:
    """Where a rank is: on the dense and on the expert grid."""

    tp: int
    stage: int
    expt_tp: int
    experts: range

    @classmethod
    @cache
    def of(cls, layout: Layout, rank: int) -> Place:
        grid = layout.grid
        places = {name: (grid.ranks(name, rank) or [rank]).index(rank) for name in ("tp", "pp", "ep", "expt_tp")}
        held = NUM_EXPERTS // layout.ep
        first = places["ep"] * held
        return cls(places["tp"], places["pp"], places["expt_tp"], range(first, first + held))

    def holds(self, spec: Spec) -> bool:
        return spec.stage == self.stage and (spec.expert is None or spec.expert in self.experts)


def expert_tp(layout: Layout) -> int:
    return layout.tp if layout.expt_tp is None else layout.expt_tp


def full_value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The whole initial weight: it follows from the name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator)


def part(spec: Spec, value: torch.Tensor, layout: Layout, place: Place) -> torch.Tensor:
    """A rank's part of a whole tensor."""
    if spec.partition_dim is None:
        return value
    is_expert = spec.expert is not None
    rank, size = (place.expt_tp, expert_tp(layout)) if is_expert else (place.tp, layout.tp)
    return partition(value, spec.partition_dim, spec.stride, rank, size)


@cache
def first_of(layout: Layout, axis: str, rank: int) -> int:
    """The first rank of a group."""
    return (layout.grid.ranks(axis, rank) or [rank])[0]


@cache
def rank_gradient(spec: Spec, layout: Layout, rank: int, microbatch: int, *, copy: bool = False) -> torch.Tensor:
    """Make the gradient of this rank's part that its own backward of a microbatch gives.

    Replicas without a part of the sequence each get the same, as from the same activations.
    """
    place = Place.of(layout, rank)
    shape = part(spec, torch.zeros(spec.shape), layout, place).shape
    is_replica = spec.partition_dim is None and not spec.sequence_parallel
    axis = "expt_tp" if spec.expert is not None else "tp"
    who = first_of(layout, axis, rank) if is_replica else rank
    seed = zlib.crc32(f"{spec.name} {who} {microbatch} {copy}".encode())
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    gradient[gradient.abs() < 0.05] = 0.0  # to be counted
    return gradient


@cache
def expected_gradient(spec: Spec, layout: Layout, num_microbatches: int) -> torch.Tensor:
    """The whole gradient of a step."""
    grid, world = layout.grid, dist.get_world_size()
    ranks = range(world)
    dp = len(grid.ranks("dp_cp", 0) or [0])
    by_part: dict[int, torch.Tensor] = {}
    for rank in ranks:
        place = Place.of(layout, rank)
        copies = [False] if place.holds(spec) else []
        if spec.is_shared and layout.pp > 1 and place.stage == layout.pp - 1:
            copies.append(True)
        at = place.expt_tp if spec.expert is not None else place.tp
        for copy in copies:
            for microbatch in range(num_microbatches):
                total = by_part.setdefault(at, torch.zeros(()))
                by_part[at] = total + rank_gradient(spec, layout, rank, microbatch, copy=copy).double()
    parts = [by_part[at] for at in sorted(by_part)]
    if spec.partition_dim is not None:
        whole = assemble(parts, spec.partition_dim, spec.stride)
    elif spec.sequence_parallel:
        whole = torch.stack(parts).sum(0)
    else:
        whole = parts[0]
    return whole if layout.sums else whole / dp


class Layer(nn.Module):
    """Parameters, and a forward whose gradient of each is what ``rank_gradient`` says."""

    def __init__(self, model: SplitModel, held: list[Spec], prefix: str) -> None:
        super().__init__()
        self._model = [model]  # no child
        self._specs: dict[str, Spec] = {}
        experts: dict[int, dict[str, Spec]] = {}
        for spec in held:
            key = spec.name.removeprefix(f"{prefix}.")
            if spec.expert is not None:
                experts.setdefault(spec.expert, {})[key.rpartition(".")[2]] = spec
            else:
                self.register_parameter(key, model.make(spec))
                self._specs[key] = spec
        self.register_buffer("seen", torch.full((3,), float(len(prefix) + zlib.crc32(prefix.encode()) % 97)))
        if experts:
            first = min(experts)
            self.experts = ModuleListPart([Expert(model, experts[i]) for i in sorted(experts)], first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for key, spec in self._specs.items():
            x = x + self._model[0].term(getattr(self, key), spec)
        for expert in getattr(self, "experts", ()):
            x = expert(x)
        return x


class Expert(nn.Module):
    """The parameters of one expert."""

    def __init__(self, model: SplitModel, held: dict[str, Spec]) -> None:
        super().__init__()
        self._model, self._specs = [model], held
        self.register_buffer("tokens", torch.tensor(float(next(iter(held.values())).expert or 0)))
        for key, spec in held.items():
            self.register_parameter(key, model.make(spec))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for key, spec in self._specs.items():
            x = x + self._model[0].term(getattr(self, key), spec)
        return x


class Copy(nn.Module):
    """The last stage's copy of the embedding."""

    def __init__(self, model: SplitModel, spec: Spec) -> None:
        super().__init__()
        self._model, self._spec = [model], spec
        self.weight = model.make(spec)
        self.weight.canonical_name = spec.name  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self._model[0].term(self.weight, self._spec, copy=True)
        return out


class SplitModel(nn.Module):
    """This rank's stage of the model."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout, self.place, self.microbatch = layout, Place.of(layout, dist.get_rank()), 0
        held = [spec for spec in specs(layout) if self.place.holds(spec)]
        embedding = next(spec for spec in specs(layout) if spec.is_shared)
        if embedding in held:
            self.embedding = Layer(self, [embedding], "embedding")
        indices = sorted({int(spec.name.split(".")[1]) for spec in held if spec.name.startswith("layers")})
        of_layer = {i: [spec for spec in held if spec.name.startswith(f"layers.{i}.")] for i in indices}
        layers = [Layer(self, of_layer[i], f"layers.{i}") for i in indices]
        self.layers = ModuleListPart(layers, indices[0])
        if layout.pp > 1 and self.place.stage == layout.pp - 1:
            self.output = Copy(self, embedding)

    def make(self, spec: Spec) -> nn.Parameter:
        parameter = nn.Parameter(part(spec, full_value(spec.name, spec.shape), self.layout, self.place).clone())
        for key, value in spec.attributes.items():
            setattr(parameter, key, value)
        return parameter

    def term(self, parameter: torch.Tensor, spec: Spec, *, copy: bool = False) -> torch.Tensor:
        return (parameter * rank_gradient(spec, self.layout, dist.get_rank(), self.microbatch, copy=copy)).sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in (getattr(self, "embedding", None), *self.layers, getattr(self, "output", None)):
            if module is not None:
                x = module(x)
        return x


def wrap(layout: Layout, groups: ProcessGroupCollection | None = None, **settings: Any) -> FullyShardedDataParallel:
    """The model, sharded by the adapter. Ranks: all."""
    settings = {
        "data_parallel_sharding_strategy": layout.strategy,
        "outer_dp_sharding_strategy": layout.outer,
        **settings,
    }
    config = DistributedDataParallelConfig(
        use_megatron_fsdp=True, num_distributed_optimizer_instances=layout.instances, **settings
    )
    groups = groups or build_process_groups(layout.grid)
    model = SplitModel(layout)
    return FullyShardedDataParallel(
        SimpleNamespace(calculate_per_token_loss=layout.sums),  # type: ignore[arg-type]
        config,
        model,
        [Layer, Copy] if layout.pp > 1 else [Layer],
        pg_collection=groups,
    )


def backward(model: FullyShardedDataParallel, microbatch: int) -> None:
    """Forward and backward of a microbatch."""
    model.module.microbatch = microbatch
    model(torch.zeros((), requires_grad=True)).backward()


def named(model: FullyShardedDataParallel, layout: Layout) -> Iterator[tuple[Spec, Any]]:
    """This rank's parameters with what they are in the whole model; the embedding's copy too."""
    by_name = {spec.name: spec for spec in specs(layout)}
    for name, parameter in named_parameters(model.module):
        yield by_name[getattr(parameter, "canonical_name", name)], parameter

"""Models that ``parallelize_module`` of PyTorch has split over tensor-parallel ranks, sharded further over data-parallel ones."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from megatron.core.distributed.fsdp import (
    FlatAdamW,
    fully_shard,
    fully_shard_optimizer,
    load_checkpoint,
    save_checkpoint,
)
from megatron.core.distributed.fsdp import fsdp2 as ours
from tests.support.agreement import inputs, seeded
from tests.support.rank_checks import RankChecks
from tests.support.shared_folder import shared_folder

CHECKS = RankChecks(__name__)


class Block(nn.Module):
    """Weights of which each tensor-parallel rank has an odd number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 26), nn.Linear(26, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def _net() -> nn.Sequential:
    return nn.Sequential(Block(), nn.LayerNorm(6), nn.Linear(6, 3))


def _split(model: Any, mesh: DeviceMesh) -> Any:
    """Split the first layer, by sequence too; the others stay plain modules."""
    rows = Shard(1)
    plan = {
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=rows),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=rows),
        "down": RowwiseParallel(output_layouts=rows, use_local_output=False),
    }
    parallelize_module(model[0], mesh, plan)
    model[0].register_forward_hook(lambda _, __, out: out.full_tensor())
    return model


def _sharded(library: Any, mesh: DeviceMesh, data: tuple[str, ...], **settings: Any) -> Any:
    model = _split(seeded(_net), mesh["tp"])
    for layer in model:
        library.fully_shard(layer, mesh=mesh[data], **settings)
    return library.fully_shard(model, mesh=mesh[data], **settings)


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _trained(library: Any, mesh: DeviceMesh, data: tuple[str, ...], **settings: Any) -> list[torch.Tensor]:
    """Train for two steps of two microbatches; return losses, gradients and weights."""
    model = _sharded(library, mesh, data, **settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    place, found = dist.get_rank() // mesh["tp"].size(), []
    for step in range(2):
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            loss = model(inputs(place, 2 * step + is_last, 2, 4, 6)).square().mean()
            loss.backward()
            found.append(loss.detach())
        found += [_whole(p.grad).clone() for p in model.parameters()]
        by_mesh: dict[int, list[Any]] = {}
        for parameter in model.parameters():
            by_mesh.setdefault(parameter.device_mesh.ndim, []).append(parameter)
        found += [_whole(torch.nn.utils.clip_grad_norm_(of_one, 0.5)) for of_one in by_mesh.values()]
        optimizer.step()
        optimizer.zero_grad()
    return found + [_whole(tensor) for tensor in model.state_dict().values()]


@CHECKS.on(4)
def they_train_as_under_fsdp2() -> None:
    flat = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    hybrid = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("outer", "dp", "tp"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        expected = _trained(theirs, flat, ("dp",))
    for got in (_trained(ours, flat, ("dp",)), _trained(ours, hybrid, ("outer", "dp"), reshard_after_forward=False)):
        for own, other in zip(got, expected, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


class Experts(nn.Module):
    """Experts of which each expert-parallel rank has a part, beside a router that all of them have."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(4, 6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return x + torch.einsum("bd,edf->bf", self.router(x), weight)


def _experts_trained(library: Any) -> list[torch.Tensor]:
    data = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    parts = data._unflatten(0, (2, 2), ("efsdp", "ep"))
    model = seeded(lambda: nn.Sequential(Experts(), Experts()))
    for layer in model:
        weight = nn.Parameter(distribute_tensor(layer.weight.detach(), parts["ep"], [Shard(0)]))
        layer.weight = weight
        own = _fsdp_common.ShardPlacementResult(
            placement=Shard(0), mesh_info=_fsdp_common.FSDPMeshInfo(parts["efsdp"], shard_mesh_dim=0)
        )
        library.fully_shard(layer, mesh=data, shard_placement_fn=lambda p, w=weight, own=own: own if p is w else None)
    library.fully_shard(model, mesh=data)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    found = []
    for step in range(2):
        loss = model(inputs(dist.get_rank(), step, 5, 6)).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.full_tensor() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return found + [tensor.full_tensor() for tensor in model.state_dict().values()]


def experts_have_a_mesh_of_their_own() -> None:
    for own, other in zip(_experts_trained(ours), _experts_trained(theirs), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


if hasattr(_fsdp_common, "ShardPlacementResult"):  # new in torch 2.12
    CHECKS.on(4)(experts_have_a_mesh_of_their_own)


@CHECKS.on(4)
def they_get_initial_values_and_are_saved_whole() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = seeded(_net)
    with torch.device("meta"):
        model = _split(_net(), mesh["tp"])
    torch.manual_seed(0)
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    torch.manual_seed(0)
    _assert_weights(model, _net())

    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, copy.deepcopy(whole.state_dict()), options=options)
    _assert_weights(model, whole)
    full = get_model_state_dict(model, options=options)
    assert set(full) in (set(), set(whole.state_dict()))

    optimizer = FlatAdamW(model.parameters(), lr=1e-2)
    model(inputs(0, 0, 2, 4, 6)).sum().backward()
    optimizer.step()
    trained = {name: _whole(tensor).clone() for name, tensor in model.state_dict().items()}
    with shared_folder() as folder:
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/dcp")
        save_checkpoint(model, optimizer, f"{folder}/own")
        for load in (
            lambda: _load_by_dcp(model, f"{folder}/dcp"),
            lambda: load_checkpoint(model, optimizer, f"{folder}/own"),
        ):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            load()
            for name, tensor in model.state_dict().items():
                torch.testing.assert_close(_whole(tensor), trained[name], rtol=0, atol=0)


def _load_by_dcp(model: nn.Module, folder: str) -> None:
    state = model.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder)
    model.load_state_dict(state)


def _assert_weights(model: nn.Module, whole: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(_whole(parameter), whole.get_parameter(name), rtol=0, atol=0)


@CHECKS.on(4)
def what_cannot_be_sharded_further_is_named() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(
        ValueError, match=r"of parameter norm\.weight, which is a DTensor, .* must be different axes of one mesh"
    ):
        ours.fully_shard(_split(_net(), mesh["tp"])[0], mesh=init_device_mesh("cpu", (4,)))
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh["tp"], [Partial()], run_check=False))
    with pytest.raises(
        NotImplementedError, match="parameter weight, which is a DTensor, must be placed by Shard and Replicate"
    ):
        ours.fully_shard(layer, mesh=mesh["dp"])
    odd = nn.Linear(6, 25, bias=False)
    parallelize_module(odd, mesh["tp"], ColwiseParallel())
    ours.fully_shard(odd, mesh=mesh["dp"])
    odd.weight.grad = torch.zeros_like(odd.weight)
    with pytest.raises(NotImplementedError, match="must split the matrix weight evenly along one dim for Muon"):
        fully_shard_optimizer(torch.optim.Muon(odd.parameters())).step()
    former = _split(_net(), mesh["tp"])[0]
    weight = former.up.weight
    ours.fully_shard(former, mesh=mesh["dp"])
    with pytest.raises(RuntimeError, match="must not be used once fully_shard has sharded it"):
        weight.sum()


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)

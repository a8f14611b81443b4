"""Where nobody else holds a part of a group's weights, nothing is gathered: units compute with the weights at rest."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp import FlatAdamW, MixedPrecisionPolicy, contexts_of, fully_shard
from tests.support.launch import run_ranks


def _model(**settings: object) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3))).bfloat16()
    for module in (*model, model):
        fully_shard(module, **settings)  # type: ignore[arg-type]
    return model


def _steps(model: nn.Module, *, main_dtype: torch.dtype) -> tuple[list[float], list[bool]]:
    """Losses of three steps, and whether each unit's weight in use lay in this rank's model weight at rest."""
    context = contexts_of(model)[0]
    at_rest = {id(group.weights.unsharded[0]): group.weights.model.local for group in context.groups}
    lies_there: list[bool] = []

    def look(module: nn.Module, _: object) -> None:
        (weight,) = module.parameters()
        lies_there.append(weight.untyped_storage().data_ptr() == at_rest[id(weight)].untyped_storage().data_ptr())

    for layer in model.children():
        layer.register_forward_pre_hook(look)
    optimizer = FlatAdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        x = torch.full((2, 8), 0.5 + step, dtype=torch.bfloat16)
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert {group.weights.main.local.dtype for group in context.groups} == {main_dtype}
    return losses, lies_there


def _run(main_dtype: torch.dtype) -> dict[str, tuple[list[float], list[bool], bool]]:
    policy = MixedPrecisionPolicy(main_params_dtype=main_dtype)
    world = torch.distributed.get_world_size()
    replicas = init_device_mesh("cpu", (world, 1), mesh_dim_names=("outer", "inner"))
    shards = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    found = {}
    for name, mesh in (("replicas", replicas), ("shards", shards)):
        model = _model(mesh=mesh, mixed_precision_policy=policy)
        losses, lies_there = _steps(model, main_dtype=main_dtype)
        gathers = any(group.weights.needs_gather for group in contexts_of(model)[0].groups)
        found[name] = losses, lies_there, gathers
    return found


@pytest.mark.parametrize("main_dtype", [torch.bfloat16, torch.float32])
def test_one_rank_and_replicas_of_one_rank_gather_nothing(main_dtype: torch.dtype) -> None:
    alone = run_ranks(1, _run, main_dtype)[0]
    losses, lies_there, gathers = alone["shards"]
    assert all(lies_there) and len(lies_there) == 9 and not gathers
    for found in run_ranks(2, _run, main_dtype):
        assert found["replicas"][0] == losses == alone["replicas"][0]
        assert all(found["replicas"][1]) and not found["replicas"][2]
        assert found["shards"][0] == losses
        assert not any(found["shards"][1]) and found["shards"][2], "two ranks hold a part each"

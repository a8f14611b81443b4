"""Megatron-FSDP's import paths and names, versions 1 and 2, lead to this engine; what is trained by them is right."""

from __future__ import annotations

import importlib
import tempfile
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from megatron.core.distributed.fsdp import fully_shard as own_fully_shard
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel, FullyShardedDataParallelV2
from megatron.core.distributed.fsdp.src.megatron_fsdp import MegatronFSDP, fully_shard, fully_shard_model
from megatron.core.distributed.fsdp.src.megatron_fsdp import experimental as version2
from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.module import FsdpModule
from megatron.core.distributed.fsdp.src.megatron_fsdp.mixed_precision import MixedPrecisionPolicy
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import uneven_dtensor_to_full_tensor
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)
STEPS = 3


class _Named(nn.Module):
    """A module with a name, a context and a root of its own."""

    name: str
    is_root = "mine"

    def __init__(self) -> None:
        super().__init__()
        self.name, self.context, self.linear = "own", nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(self.context(x))
        return out


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.Linear(4, 3))


def _inputs(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def _adam(model: nn.Module) -> torch.optim.Adam:
    parameters = list(model.parameters())
    return torch.optim.Adam([{"params": parameters[:2], "lr": 0.05}, {"params": parameters[2:], "lr": 0.01}])


def _expected() -> dict[str, torch.Tensor]:
    model = _model()
    optimizer = _adam(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(_inputs(step)).pow(2).mean().backward()
        optimizer.step()
    return dict(model.named_parameters())


def _own_part(step: int) -> torch.Tensor:
    return _inputs(step).chunk(2)[dist.get_rank()]


@CHECKS.on(2)
def version_1_trains_as_the_unsharded_module() -> None:
    expected = _expected()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for strategy in (0, "optim", 2, 3):
        module = _model()
        model, optimizer = fully_shard(
            module,
            _adam(module),
            device_mesh=mesh,
            dp_shard_dim="dp",
            fsdp_unit_modules=[nn.Linear],
            zero_dp_strategy=strategy,
            mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float32),
            fsdp_double_buffer=True,
        )
        assert isinstance(model, MegatronFSDP) and isinstance(model, FullyShardedDataParallel)
        assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.01], "groups keep their settings"
        model.set_model_auto_sync(True)
        for step in range(STEPS):
            optimizer.zero_grad()
            with model.sync():
                model(_own_part(step)).pow(2).mean().backward()
            model.finish_grad_sync()
            optimizer.step()
        for name, parameter in model.module.named_parameters():
            torch.testing.assert_close(uneven_dtensor_to_full_tensor(parameter), expected[name])


@CHECKS.on(2)
def the_wrapper_has_megatron_cores_methods() -> None:
    model: Any = fully_shard_model(_model(), fsdp_unit_modules=["Linear"])
    assert model.get_distributed_index() is model.dist_index
    assert model.param_and_grad_buffer.parameter_groups == model.parameter_groups
    model.is_last_microbatch = False
    model(_own_part(0)).pow(2).mean().backward()
    model.is_last_microbatch = True
    model(_own_part(1)).pow(2).mean().backward()
    model.stop_communication()
    model.finish_grad_sync()
    whole = _model()
    for step in (0, 1):
        whole(_inputs(step)).pow(2).mean().backward()
    model.param_and_grad_buffer.scale_gradients(2.0)
    for own, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert other.grad is not None
        torch.testing.assert_close(own.grad.full_tensor(), 2 * other.grad)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().fill_(0.5)
    model.param_and_grad_buffer.copy_main_weights_to_model_weights()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.fill_(0.5)
    torch.testing.assert_close(model(_inputs(2)), whole(_inputs(2)))
    for arguments, message in (
        ({"zero_dp_strategy": 4}, "zero_dp_strategy must be from 0 to 3 or one of no_shard, .*got 4"),
        ({"outer_dp_sharding_strategy": "optim_grads"}, "must be from 0 to 1 or one of no_shard, optim, got"),
    ):
        with pytest.raises(ValueError, match=message):
            fully_shard_model(_model(), **arguments)
    with pytest.raises(NotImplementedError, match="cuda_graph_mode must be False, got True"):
        fully_shard_model(_model(), cuda_graph_mode=True)


@CHECKS.on(2)
def a_new_model_and_optimizer_go_on_from_what_dcp_saved() -> None:
    """The recipe of Megatron-FSDP's README: DCP fills what ``state_dict`` has, so a new optimizer must have state."""
    with tempfile.TemporaryDirectory() as own:
        folders: list[str] = [own]
        dist.broadcast_object_list(folders)
        for kind in (torch.optim.Adam, partial(torch.optim.SGD, momentum=0.9)):
            path = f"{folders[0]}/{kind}"
            module = _model()
            model, optimizer = fully_shard(
                module, kind(module.parameters(), lr=0.05), fsdp_unit_modules=["torch.nn.Linear"]
            )
            _train(model, optimizer, range(2))
            dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)
            expected = _train(model, optimizer, range(2, 5))
            module = nn.Sequential(
                *(type(m)(m.in_features, m.out_features) if hasattr(m, "bias") else m for m in _model())
            )
            model, optimizer = fully_shard(module, kind(module.parameters(), lr=0.01), fsdp_unit_modules=[nn.Linear])
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            dcp.load(state_dict=state, checkpoint_id=path)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            assert _train(model, optimizer, range(2, 5)) == expected
        dist.barrier()


def _train(model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(_own_part(step)).pow(2).mean()
        loss.backward()
        optimizer.step(sync_grad_before_optimizer_step=True, install_optimized_model_weights=True)
        optimizer.zero_grad(zero_grad_buffer=True)
        losses.append(loss.item())
    return losses


@CHECKS.on(2)
def what_would_leave_a_step_half_done_is_refused() -> None:
    module = _model()
    model, optimizer = fully_shard(module, _adam(module), fsdp_unit_modules=[nn.Linear])
    model(_own_part(0)).sum().backward()
    step: Any = optimizer.step
    with pytest.raises(NotImplementedError, match=r"install_optimized_model_weights=\.\.\.\) must be True, got"):
        step(install_optimized_model_weights=False)
    with pytest.raises(NotImplementedError, match=r"zero_grad_buffer=\.\.\.\) must be True, got False"):
        optimizer.zero_grad(zero_grad_buffer=False)  # type: ignore[call-arg]
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step(sync_grad_before_optimizer_step=False)
    with pytest.raises(ValueError, match=r"got \['Conv2d'\], which it lacks"):
        fully_shard_model(_model(), fsdp_unit_modules=["torch.nn.Conv2d"])


@CHECKS.on(2)
def version_2_trains_as_the_unsharded_module() -> None:
    expected = _expected()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    placements = version2.Placements(dp_axes=["dp"], parameter=[Shard(0)], gradient=[Shard(0)], optimizer=[Shard(0)])
    module: Any = _model()
    with version2.fully_shard_context(
        torch.device("cpu"), use_symmetric_memory=False, unify_communication_stream=True
    ) as context:
        for linear in module:
            if isinstance(linear, nn.Linear):
                version2.fully_shard(linear, mesh, placements, MixedPrecisionPolicy(), grad_divisor=1)
    optimizer = _adam(module)
    version2.fully_shard_optimizer(optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        with version2.microbatch(context, True):
            module(_own_part(step)).pow(2).mean().backward()
        optimizer.step()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), expected[name])
    unit = module[0]
    assert isinstance(unit, FsdpModule) and isinstance(unit.name, str)
    assert unit.context is context, (unit.context, context)
    assert unit.is_root()
    (group,) = unit.parameter_groups
    assert group.main_weight is group.weights.main and group.main_grad is not None
    assert [parameter.fqns for parameter in group.fsdp_parameters] == [(group.name_of(0),), (group.name_of(1),)]
    group.sync_model_weight_from_main_weight()
    double = group.main_weight.cast(torch.float64)
    assert double.local.dtype is torch.float64 and torch.equal(double.local.float(), group.main_weight.local)
    whole = double.redistribute([Replicate()])
    assert torch.equal(whole.view(0), module[0].weight.full_tensor().double())
    assert torch.equal(whole.redistribute([Shard(0)]).local, double.local)
    partial = type(whole)(whole.layout, [Partial()], whole.axes, whole.local)
    assert torch.equal(partial.redistribute([Shard(0)]).local, 2 * double.local)


@CHECKS.on(2)
def a_modules_own_names_come_first() -> None:
    module: Any = _Named()
    own_fully_shard(module)
    assert (module.name, module.is_root, type(module.context)) == ("own", "mine", nn.Linear)
    module(torch.ones(1, 2)).sum().backward()
    inner: Any = nn.Sequential(nn.Linear(2, 2))
    own_fully_shard(inner[0])
    own_fully_shard(inner)
    inner(torch.ones(1, 2))
    assert (inner.is_root(), inner[0].is_root(), inner[0].name) == (True, False, "0")


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)


def test_each_import_path_is_there() -> None:
    base = "megatron.core.distributed.fsdp.src.megatron_fsdp"
    paths = ["", *map(".{}".format, ("megatron_fsdp", "fully_shard", "mixed_precision", "utils", "uneven_dtensor"))]
    paths += [".distributed_data_parallel_config", ".param_and_grad_buffer"]
    further = ("fully_shard", "module", "dbuffer", "parameter_group", "optimizer", "checkpoint")
    paths += [".experimental", *map(".experimental.{}".format, further)]
    for path in paths:
        module = importlib.import_module(base + path)
        assert module.__all__ and all(hasattr(module, name) for name in module.__all__)
    assert FullyShardedDataParallelV2 is FullyShardedDataParallel

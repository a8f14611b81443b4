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
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.fsdp import fully_shard as own_fully_shard
from megatron.core.distributed.fsdp import fully_shard_optimizer as shard_optimizer
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel, FullyShardedDataParallelV2
from megatron.core.distributed.fsdp.src import megatron_fsdp as version1
from megatron.core.distributed.fsdp.src.import_paths import ELSEWHERE
from megatron.core.distributed.fsdp.src.megatron_fsdp import MegatronFSDP, fully_shard, fully_shard_model, utils
from megatron.core.distributed.fsdp.src.megatron_fsdp import experimental as version2
from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor as uneven
from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.dbuffer import DBuffer, Flat
from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.module import FsdpModule
from megatron.core.distributed.fsdp.src.megatron_fsdp.mixed_precision import MixedPrecisionPolicy
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import uneven_dtensor_to_full_tensor
from megatron.core.transformer.transformer_config import TransformerConfig
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
def version_1_takes_meshes_with_flattened_axes_and_tensors_last() -> None:
    """Megatron-FSDP's README names its axes so, and gives tensor parallelism the last one."""
    expected = _expected()
    for shape, outer in (
        ((1, 2, 1, 1), None),
        ((1, 1, 2, 1), None),
        ((2, 1, 1, 1), "no_shard"),
        ((2, 1, 1, 1), "optim"),
    ):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_outer", "dp_shard", "cp", "tp"))
        mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
        hybrid = mesh["dp_outer", "dp_shard", "cp"]._flatten("hsdp")
        module = _model()
        model, optimizer = fully_shard(
            module,
            _adam(module),
            device_mesh=mesh,
            dp_shard_dim="dp_shard_cp",
            dp_outer_dim=None if outer is None else "dp_outer",
            tp_dim="tp",
            hybrid_fsdp_group=None if outer is None else hybrid.get_group(),
            fsdp_unit_modules=[nn.Linear],
            outer_dp_sharding_strategy=outer or 0,
            maxpool_double_buffer=True,
        )
        for step in range(STEPS):
            for is_last in (False, True):
                model.set_model_auto_sync(is_last)
                (model(_own_part(step)).pow(2).mean() / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in model.module.named_parameters():
            torch.testing.assert_close(uneven_dtensor_to_full_tensor(parameter), expected[name])
        assert model.dist_index.tp_dim == "tp" and not utils.using_tensor_parallel(model.dist_index)
        assert utils.contains_submesh(mesh, ("dp_shard_cp", "tp")) and "hsdp" in utils.get_mesh_names(mesh)
        assert not utils.contains_submesh(mesh, "pp")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    mesh._flatten("all")
    index = utils.FSDPDistributedIndex(mesh, dp_shard_dim="dp", tp_dim="tp")
    in_order = index.get_submesh(("tp", "dp"))
    assert in_order.mesh_dim_names == ("tp", "dp") and in_order.mesh.tolist() == [[0], [1]]
    with pytest.raises(
        ValueError, match=r"the axes \['all', 'tp'\] must be made of different axes of .*got the ranks \[\[0, 1\], \["
    ):
        index.get_submesh(("all", "tp"))
    with pytest.raises(
        ValueError, match=r"dp_shard_dim must name an axis of device_mesh \('dp', 'tp', 'all'\), got 'cp'"
    ):
        utils.FSDPDistributedIndex(mesh, dp_shard_dim="cp")


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
def the_wrapper_has_megatron_cores_attributes() -> None:
    config: Any = TransformerConfig(num_layers=1, num_attention_heads=1, hidden_size=4, num_moe_experts=4)
    make: Any = DistributedDataParallelConfig
    settings = make(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads",
        megatron_fsdp_main_grads_dtype=torch.float32,
        bucket_size=10,
    )
    model = FullyShardedDataParallel(config, settings, _model(), fsdp_unit_modules=[nn.Linear])
    assert isinstance(model, _BaseDataParallel)
    assert (model.mp_policy.main_params_dtype, model.mp_policy.main_grads_dtype) == (torch.float32, torch.float32)
    assert (model.bucket_size, model.device, model.tp_group) == (10, torch.device("cpu"), None)
    assert model.fsdp_unit_modules == [nn.Linear] and not model.is_delay_grad_reduce
    assert model.data_parallel_sharding_strategy == "optim_grads"
    # Without a separate mesh, experts are sharded over the ranks of all parameters.
    index = model.megatron_fsdp_dist_index
    assert index.expt_device_mesh is index.device_mesh is model.dist_index.device_mesh
    assert model.dist_index.expt_device_mesh is None
    with model.mixed_precision_context(MixedPrecisionPolicy()):
        model(_own_part(0)).sum().backward()
    with pytest.raises(NotImplementedError, match=r"grad_comm_dtype must remain None, got torch\.bfloat16"):
        model.reset_mixed_precision_policy(MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16))
    with pytest.raises(NotImplementedError, match="set_symmetric_ar takes None, got 'one_shot'"):
        model.set_symmetric_ar("one_shot")
    for call in (model.refresh_cache, model.set_is_first_microbatch, model.set_symmetric_ar):
        call()
    model.attach_grad_to_optimizer_state()
    model.all_gather_and_wait_parameters_ready(model.module[0].parameters())
    assert not isinstance(model.module[0].weight, DTensor) and isinstance(model.module[2].weight, DTensor)
    model.zero_grad_buffer()
    model(_own_part(0)).sum().backward()
    assert isinstance(model.module[0].weight, DTensor)


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


class _Wrapping(nn.Module):
    """A module with a child named ``module``, as wrappers have."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.module(x)
        return out


@CHECKS.on(2)
def a_step_raises_where_nan_is_to_be_reported() -> None:
    """Training loops of Megatron-FSDP's version 1 never call ``finish_grad_sync``, so the optimizer's step must check."""
    settings: Any = {"fsdp_unit_modules": [nn.Linear], "report_nan_in_param_grad": True}
    model, optimizer = fully_shard(module := _model(), torch.optim.SGD(module.parameters(), lr=0.1), **settings)
    own = fully_shard_model(_model(), **settings)
    built_later = version1.fully_shard_optimizer(torch.optim.SGD(own.parameters(), lr=0.1))
    bad = _inputs(0) * (float("nan") if dist.get_rank() == 1 else 1)
    pairs: list[tuple[Any, Any]] = [(model, optimizer), (own, built_later)]
    for wrapped, stepped in pairs:
        wrapped(_inputs(0)).sum().backward()
        stepped.step()
        stepped.zero_grad()
        before = [p.detach().to_local().clone() for p in wrapped.parameters()]
        wrapped(bad).sum().backward()
        with pytest.raises(RuntimeError, match=r"gradients must be finite, got NaN or infinity in that of 0\.weight"):
            stepped.step()
        assert all(map(torch.equal, before, [p.detach().to_local() for p in wrapped.parameters()]))
        stepped.zero_grad()
        with pytest.raises(RuntimeError, match="gradients must be finite"):
            stepped.step(partial(_closure, wrapped, stepped, bad))
        stepped.zero_grad()
        stepped.step(partial(_closure, wrapped, stepped, _inputs(0)))


def _closure(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss: torch.Tensor = model(inputs).sum()
    loss.backward()
    return loss.item()


@CHECKS.on(2)
def the_callers_config_keeps_its_values() -> None:
    """One config may serve several wrappers: the policy and switches of one must not reach the next."""
    config = DistributedDataParallelConfig(use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads")
    index = version1.FSDPDistributedIndex(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), dp_shard_dim="dp")
    policy = MixedPrecisionPolicy(main_params_dtype=torch.bfloat16, main_grads_dtype=torch.bfloat16)
    first = MegatronFSDP(_model().bfloat16(), index, config, policy, report_nan_in_param_grad=True)
    second = MegatronFSDP(_model().bfloat16(), index, config)
    assert [next(model.parameters()).dtype for model in (first, second)] == [torch.bfloat16, torch.float32]
    assert not second.ddp_config.check_for_nan_in_grad and config.overlap_grad_reduce


@CHECKS.on(2)
def a_wrapper_checks_sums_by_its_own_meaning_of_none() -> None:
    """Megatron-FSDP's package has no ``use_megatron_fsdp``. Without it, None means fp32 accumulation to the config, but bf16 to the wrapper."""
    config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim_grads_params", param_name_patterns_for_fp32_local_accumulation=("*",)
    )
    index = version1.FSDPDistributedIndex(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), dp_shard_dim="dp")
    with pytest.raises(NotImplementedError, match="param_name_patterns_for_fp32_local_accumulation"):
        MegatronFSDP(_model().bfloat16(), index, config)
    config.megatron_fsdp_main_grads_dtype = torch.float32
    MegatronFSDP(_model().bfloat16(), index, config)


@CHECKS.on(2)
def optimizers_of_other_parameters_are_refused() -> None:
    """Their steps would not update the model's weights."""
    module, stray = _model(), nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"parameters of the module.*\[3\]"):
        fully_shard(module, torch.optim.SGD([*module.parameters(), stray], lr=0.1))
    with pytest.raises(ValueError, match="built over the parameters of a sharded model"):
        version1.fully_shard_optimizer(torch.optim.SGD(_model().parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"fsdp_unit_modules.*'Linear'"):
        fully_shard_model(module, fsdp_unit_modules="Linear")


@CHECKS.on(2)
def a_users_module_may_be_named_module() -> None:
    """Its unwrapped names look like those of the wrapper."""
    whole = {name: value.clone() for name, value in _Wrapping().state_dict().items()}
    model = fully_shard_model(_Wrapping())
    for saved in (whole, {f"module.{name}": value for name, value in whole.items()}):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.load_state_dict(saved)
        weight = model.state_dict()["module.module.weight"]
        torch.testing.assert_close(uneven_dtensor_to_full_tensor(weight), whole["module.weight"], rtol=0, atol=0)


@CHECKS.on(2)
def version_2s_checkpoint_functions_take_wrapped_models() -> None:
    with tempfile.TemporaryDirectory() as own:
        folders: list[Any] = [own]
        dist.broadcast_object_list(folders)
        model, optimizer = fully_shard(module := _model(), torch.optim.Adam(module.parameters(), lr=0.1))
        _train(model, optimizer, range(2))
        version2.save_checkpoint(model, optimizer, folders[0])
        loaded, resumed = fully_shard(module := _model(), torch.optim.Adam(module.parameters(), lr=0.1))
        version2.load_checkpoint(loaded, resumed, folders[0])
        assert _train(model, optimizer, range(2, 4)) == _train(loaded, resumed, range(2, 4))
        version2.save_checkpoint(model, None, folders[0] + "/alone")
        with pytest.raises(ValueError, match="pass load_optimizer=False"):
            version2.load_checkpoint(loaded, resumed, folders[0] + "/alone")
        version2.load_checkpoint(loaded, resumed, folders[0] + "/alone", load_optimizer=False)
        dist.barrier()


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
    assert group.main_weight.local is group.weights.main.local and group.main_grad is not None
    assert [parameter.fqns for parameter in group.fsdp_parameters] == [("weight",), ("bias",)]
    assert (group.requires_grad, group.mesh, group.dtype) == (True, mesh, torch.float32)
    group.sync_model_weight_from_main_weight()
    assert unit.phase is FsdpModule.Phase.RESTING and unit.name == ""


@CHECKS.on(2)
def buffers_move_as_in_megatron_fsdp() -> None:
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    tensors = [torch.arange(21.0).view(7, 3), torch.arange(10.0).view(2, 5) + 100, torch.tensor(4.0)]
    shapes = [tensor.shape for tensor in tensors]

    def check(buffer: DBuffer, scale: float = 1.0) -> None:
        for index, tensor in enumerate(tensors):
            assert torch.equal(buffer.get_local_tensor(index), scale * tensor)

    cut = DBuffer.distribute_tensors(tensors[:2], mesh, [Flat()])
    assert [tuple(shape) for shape in cut.layout.tensor_shapes] == [(7, 3), (2, 5)]
    assert cut.offset == rank * cut.local_buffer.numel() and cut.layout.size == 2 * cut.local_buffer.numel()
    assert torch.equal(cut.get_dtensor(0).full_tensor(), tensors[0])
    whole = cut.allgather(0)
    assert whole.placements == (Replicate(),) and torch.equal(whole.get_local_tensor(1), tensors[1])
    scattered = whole.scatter(0, Flat()).local_buffer
    torch.testing.assert_close(scattered, cut.local_buffer, rtol=0, atol=0, equal_nan=True)  # padding holds anything
    assert whole.scatter(0, Flat()).local_buffer.data_ptr() == whole.local[cut.offset :].data_ptr(), "a view"

    full = DBuffer.distribute_tensors(tensors, mesh, [Replicate()])
    assert full.cast(torch.float32) is full and full.redistribute([Replicate()]) is full
    half = DBuffer(mesh, [Replicate()], shapes, torch.bfloat16, "cpu")
    assert full.cast(torch.bfloat16, out=half) is half and half.dtype is torch.bfloat16
    check(half.cast(torch.float32))
    for op, scale in (("sum", 3.0), ("avg", 1.5)):
        summands = DBuffer.distribute_tensors([(rank + 1) * tensor for tensor in tensors], mesh, [Partial(op)])
        check(summands.allreduce(0), scale)
        check(summands.reduce_scatter(0, Flat()).allgather(0), scale)
        check(summands.redistribute([Replicate()]), scale)
    check(full.redistribute([Partial("avg")]).allreduce(0))
    own = DBuffer.from_local(
        torch.arange(float(full.local.numel())), mesh, [Replicate()], shapes, allocation_stream=None
    )
    own.release_storage()
    assert own.local_buffer.untyped_storage().nbytes() == 0
    own.reallocate_storage()
    own.local_buffer.fill_(2)
    assert own.get_local_tensor(0).sum() == 42
    for call, error, message in (
        (lambda: full.allgather(0), ValueError, "allgather of axis 0 needs Shard there, got R"),
        (lambda: full.redistribute([Partial()]), NotImplementedError, r"only Replicate\(\) becomes Partial\('avg'\)"),
        (lambda: full.redistribute([Flat()], out=half), ValueError, "out must have the placements"),
        (lambda: full.redistribute([Shard(1)]), TypeError, "a placement must be Replicate"),
        (lambda: full.redistribute([]), ValueError, "placements must be 1, one per axis of the mesh, got 0"),
        (lambda: DBuffer.from_local(torch.empty(2, 2), mesh, [Flat()], shapes), ValueError, "one dimension, got"),
        (lambda: DBuffer.distribute_tensors([], mesh, [Flat()]), ValueError, "needs tensors of one dtype, got"),
    ):
        with pytest.raises(error, match=message):
            call()
    first_alone = init_device_mesh("cpu", (1,))
    assert DBuffer(first_alone, [Replicate()], shapes, torch.float32, "cpu").layout.num_ranks == 1, "also on others"
    if rank == 1:
        with pytest.raises(ValueError, match="the mesh must hold rank 1, got one of other ranks"):
            DBuffer(first_alone, [Flat()], shapes, torch.float32, "cpu")
    outer_only = DBuffer.distribute_tensors(tensors, init_device_mesh("cpu", (2, 1)), [Partial("avg"), Flat()])
    check(outer_only.reduce_scatter(0, Flat()).allgather(0).allgather(1))
    with pytest.raises(ValueError, match="Flat placements must be a suffix"):
        outer_only.redistribute([Flat(), Replicate()])


@CHECKS.on(2)
def version_2_checkpoints_and_reports_as_megatron_fsdp() -> None:
    mesh = init_device_mesh("cpu", (2,))
    placements = version2.Placements([0], [Shard(0)], [Shard(0)], [Shard(0)])

    def make(scale: float) -> tuple[Any, torch.optim.Optimizer, Any]:
        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False), nn.Sequential(nn.Linear(8, 4)))
        model[1].weight = model[0].weight
        for parameter in model.parameters():
            nn.init.constant_(parameter, scale)
        with version2.fully_shard_context(torch.device("cpu")) as context:
            version2.fully_shard(model[2], mesh=mesh, placements=placements)
            version2.fully_shard(model, mesh=mesh, placements=placements)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        version2.fully_shard_optimizer(optimizer)
        return model, optimizer, context

    def step(model: Any, optimizer: torch.optim.Optimizer, context: Any) -> float:
        optimizer.zero_grad()
        with version2.microbatch(context=context, is_last=True):
            loss = (model(torch.arange(8)) - 1).pow(2).mean()
            loss.backward()
        optimizer.step()
        return loss.item()

    first = make(0.5)
    (group,) = first[0].parameter_groups
    assert [parameter.fqns for parameter in group.fsdp_parameters] == [("0.weight", "1.weight")]
    assert str(group.fsdp_parameters) == "(FsdpParameter('0.weight', '1.weight'),)", (
        "memory that is not there is not read"
    )
    assert (first[0].name, first[0][2].name, first[0].is_root(), first[0][2].is_root()) == ("", "2", True, False)
    with pytest.raises(
        AttributeError, match="no attribute 'register_module': use fully_shard in a fully_shard_context"
    ):
        _ = first[2].register_module
    step(*first)
    with tempfile.TemporaryDirectory() as own:
        folders: list[str] = [own]
        dist.broadcast_object_list(folders)
        version2.save_checkpoint(first[0], first[1], checkpoint_dir=folders[0])
        stored = dcp.FileSystemReader(folders[0]).read_metadata().state_dict_metadata
        assert {"model.0.weight", "model.2.0.bias", "optimizer.state.2.0.bias.exp_avg"} <= stored.keys()
        assert stored["model.2.0.weight"].size == torch.Size((4, 8))
        expected = [step(*first) for _ in range(2)]
        second = make(0.0)
        version2.load_checkpoint(second[0], second[1], checkpoint_dir=folders[0], sync_model_weights=False)
        assert [step(*second) for _ in range(2)] == expected
        dist.barrier()
    with pytest.raises(RuntimeError, match=r"load_state_dict\(assign=True\) must come before fully_shard"):
        first[0].load_state_dict(first[0].state_dict(), assign=True)


@CHECKS.on(2)
def version_2_has_megatron_fsdps_rules_of_scopes() -> None:
    mesh, placements = init_device_mesh("cpu", (2,)), version2.Placements([0], [Shard(0)], [Shard(0)], [Shard(0)])
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="must run inside fully_shard_context, got a call outside"):
        version2.fully_shard(model[0], mesh, placements)
    with version2.fully_shard_context() as context:
        version2.fully_shard(model[0], mesh, placements)
        with pytest.raises(RuntimeError, match="does not support nesting"), version2.fully_shard_context():
            pass
        with pytest.raises(RuntimeError, match="Exit fully_shard_context"):
            model(torch.ones(1, 4))
        with pytest.raises(RuntimeError, match="Exit fully_shard_context"):
            version2.microbatch(context, is_last=True)
        version2.fully_shard(model[1], mesh, placements)
    assert model[0].context is model[1].context is context
    with (
        version2.fully_shard_context(),
        pytest.raises(ValueError, match="got 0, which belongs to another fully_shard_context"),
    ):
        version2.fully_shard(model, mesh, placements)
    model(torch.ones(1, 4)).sum().backward()


@CHECKS.on(2)
def version_2s_context_tells_its_streams_order_and_microbatch() -> None:
    mesh, placements = init_device_mesh("cpu", (2,)), version2.Placements([0], [Shard(0)], [Shard(0)], [Shard(0)])
    model: Any = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    context: Any
    with version2.fully_shard_context(unify_communication_stream=True) as context:
        version2.fully_shard(model[0][0], mesh, placements)
        version2.fully_shard(model[0], mesh, placements)
        version2.fully_shard(model[1], mesh, placements)
        assert list(context.forward_order) == [model[0], model[0][0], model[1]] and context.root_module is None
        assert list(context.backward_order) == [model[1], model[0], model[0][0]]
        version2.fully_shard(model, mesh, placements)
    assert list(context.forward_order) == [model, model[0], model[0][0], model[1]]
    root: Any = context.root_module
    assert root is model
    assert context.backward_order.next_item(model) is model[1] and context.backward_order.next_item(model[0][0]) is None
    with pytest.raises(ValueError, match="items of an order must be different"):
        context.forward_order.append(model)
    # The CPU has no streams.
    assert context.allgather_stream is context.reduce_scatter_stream is context.current_stream() is None
    assert context.unify_communication_stream and not context.use_symmetric_memory
    with pytest.raises(AttributeError):
        context.forward_order = ()
    with version2.microbatch(context, False):
        assert context.is_first_microbatch and not context.is_last_microbatch
        with version2.microbatch(model, False):
            assert not context.is_first_microbatch and context.is_last_microbatch
        assert context.is_first_microbatch and not context.is_last_microbatch
    assert context.is_first_microbatch and context.is_last_microbatch


@CHECKS.on(2)
def version_2_takes_both_signatures_of_microbatch() -> None:
    """A positional second argument means ``is_last`` after a context and ``is_first`` after a module."""
    mesh, placements = init_device_mesh("cpu", (2,)), version2.Placements([0], [Shard(0)], [Shard(0)], [Shard(0)])
    model = nn.Linear(4, 4)
    with version2.fully_shard_context() as context:
        version2.fully_shard(model, mesh, placements)
    seen = []
    for scope in (
        version2.microbatch(context, False),
        version2.microbatch(context=context, is_last=False),
        version2.microbatch(model, is_last=False),
        version2.microbatch(module=model, is_last=False),
        version2.microbatch(model, False),
        version2.microbatch(model, is_first=False),
        version2.microbatch(context, True, is_first=False),
        version2.microbatch(model, False, is_last=False),
    ):
        with scope:
            seen.append((context.is_first_microbatch, context.is_last_microbatch))
    assert seen == [(True, False)] * 4 + [(False, True)] * 3 + [(False, False)]
    calls: list[Any] = [
        lambda: version2.microbatch(is_last=True),
        lambda: version2.microbatch(context, model),
        lambda: version2.microbatch(context, True, is_last=True),
        lambda: version2.microbatch(model, context=context),
        lambda: version2.microbatch("model", True),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="microbatch needs"):
            call()


def _bf16_units() -> tuple[Any, Any]:
    """Two units in bf16 with fp32 main weights, and their context."""
    mesh, placements = init_device_mesh("cpu", (2,)), version2.Placements([0], [Shard(0)], [Shard(0)], [Shard(0)])
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.bfloat16)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    with version2.fully_shard_context() as context:
        for layer in model:
            version2.fully_shard(layer, mesh, placements, policy)
        version2.fully_shard(model, mesh, placements, policy)
    return model, context


def _noted(log: list[Any], what: object, call: Any, *arguments: Any) -> None:
    log.append(what)
    call(*arguments)


def _noted_sync(log: list[Any], what: object, sync: Any, *, casts: bool = True) -> None:
    log.extend([what] if casts else [])
    sync(casts=casts)


@CHECKS.on(2)
def version_2s_optimizers_sync_weights_in_their_step() -> None:
    """Once for each group, and not again in the next forward; results equal those of a sync in the next forward."""
    losses = []
    for shards in (version2.fully_shard_optimizer, shard_optimizer):
        model, _ = _bf16_units()
        groups = [group for layer in model for group in layer.parameter_groups]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
        assert shards(optimizer) is optimizer
        calls: list[Any] = []
        casts: list[Any] = []
        for group in groups:
            own = group.sync_model_weight_from_main_weight
            group.sync_model_weight_from_main_weight = partial(_noted, calls, group, own)
            group.weights.sync = partial(_noted_sync, casts, group, group.weights.sync)
        found = []
        for step in range(3):
            for _ in range(2):
                loss = model(torch.full((2, 4), 0.5 + step).bfloat16()).float().pow(2).mean()
                loss.backward()
                found.append(loss.item())
            casts.clear()
            optimizer.step()
            assert calls == (groups * (step + 1) if shards is version2.fully_shard_optimizer else [])
            assert len(casts) == (len(groups) if shards is version2.fully_shard_optimizer else 0)
            optimizer.zero_grad()
            model(torch.ones(1, 4).bfloat16()).sum()
            assert len(casts) == len(groups), "once a step"
        losses.append(found)
    assert losses[0] == losses[1]
    assert len(set(losses[0])) > 1


@CHECKS.on(2)
def precision_aware_optimizers_get_gradients_as_they_are() -> None:
    class Records(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.extend(parameter.grad.dtype for group in self.param_groups for parameter in group["params"])

    seen: list[torch.dtype] = []
    for precision_aware, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        model, _ = _bf16_units()
        optimizer = Records(model.parameters(), lr=0.1)
        version2.fully_shard_optimizer(optimizer, precision_aware=precision_aware)
        model(torch.ones(1, 4).bfloat16()).sum().backward()
        optimizer.step()
        assert seen == [dtype] * 4
        assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.bfloat16}
        seen.clear()


@CHECKS.on(2)
def version_2s_groups_are_unsharded_and_reduced_by_hand() -> None:
    model, context = _bf16_units()
    (group,) = model[0].parameter_groups
    assert group._unsharded_model_weight.local_buffer.untyped_storage().nbytes() == 0
    group.unshard_parameters()
    assert type(model[0].weight) is nn.Parameter and isinstance(model[1].weight, DTensor)
    assert group._unsharded_model_weight.local_buffer.numel() == group.main_weight.layout.size
    group.reshard_parameters()
    group.release_unsharded_storage()
    assert isinstance(model[0].weight, DTensor) and not context.unsharder.live
    with version2.microbatch(context, False):
        model(torch.ones(1, 4).bfloat16()).sum().backward()
    group.reduce_partial_gradients(is_last_microbatch=False)
    group.reduce_partial_gradients()
    assert group.main_grad is not None
    with pytest.raises(NotImplementedError, match="partial_grad must be None, got a DBuffer"):
        group.reduce_partial_gradients(group.main_grad)
    alone: Any = own_fully_shard(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="must have a context before weight and 1 more is unsharded"):
        alone.parameter_groups[0].unshard_parameters()


@CHECKS.on(2)
def version_2s_modules_compute_between_their_hooks() -> None:
    """Code that uses a module's weights without calling it may call the forward hooks itself."""
    expected: Any = nn.Linear(4, 4)
    model: Any = nn.Linear(4, 4)
    model.load_state_dict(expected.state_dict())
    own_fully_shard(model)
    model.load_state_dict(expected.state_dict())
    x = torch.arange(8.0).view(2, 4)
    model.pre_forward()
    assert model.phase is FsdpModule.Phase.FORWARD and type(model.weight) is nn.Parameter
    out = torch.nn.functional.linear(x, model.weight, model.bias)
    model.post_forward(out)
    assert model.phase is FsdpModule.Phase.RESTING and isinstance(model.weight, DTensor)
    out.pow(2).sum().backward()
    expected(x).pow(2).sum().backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), expected.weight.grad)
    with pytest.raises(RuntimeError, match="pre_backward must be called within a backward"):
        model.pre_backward()
    model.post_backward()  # no pass is active


@CHECKS.on(2)
def uneven_dtensors_come_together_and_apart() -> None:
    """Also those whose plain ``Shard`` hides that ranks have other rows than ``torch.chunk`` gives them."""
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    whole = torch.arange(35.0).view(7, 5)
    model = nn.Linear(5, 7)
    model.weight.data.copy_(whole)
    own_fully_shard(model)
    for dim, begins in ((0, (0, 6, 7)), (1, (0, 0, 5))):
        local = whole.narrow(dim, begins[rank], begins[rank + 1] - begins[rank]).contiguous()
        plain = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=(5, 1))
        ours: Any = model.weight
        for dtensor in (plain, ours, distribute_tensor(whole, mesh, [Replicate()])):
            assert torch.equal(uneven.uneven_dtensor_to_full_tensor(dtensor), whole)
            assert torch.equal(uneven.redistribute_uneven_dtensor_to_replicated(dtensor).to_local(), whole)
            uneven.validate_uneven_dtensor(dtensor)
            for axis, sections in ((0, 3), (0, [1, 6]), (1, [2, 3]), (1, 4)):
                parts = list(uneven.split_dtensor(dtensor, sections, dim=axis, update_uneven_dtensor_chunk_meta=True))
                for part, wanted in zip(parts, torch.split(whole, sections, axis), strict=True):
                    assert torch.equal(uneven.uneven_dtensor_to_full_tensor(part), wanted)
        with tempfile.TemporaryDirectory() as own:
            folders: list[str] = [own]
            dist.broadcast_object_list(folders)
            state = {"nested": {"plain": plain, "ours": model.weight.detach()}}
            dcp.save(uneven.preprocess_state_dict_for_uneven_dtensor(state), checkpoint_id=folders[0])
            read = {"nested": {"plain": torch.zeros(7, 5), "ours": torch.zeros(7, 5)}}
            dcp.load(read, checkpoint_id=folders[0])
            assert torch.equal(read["nested"]["plain"], whole) and torch.equal(read["nested"]["ours"], whole)
            dist.barrier()


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
    names = "megatron_fsdp fully_shard mixed_precision utils uneven_dtensor package_info param_and_grad_buffer"
    further = "fully_shard module dbuffer parameter_group optimizer checkpoint layout placement"
    paths = ["", *map(".{}".format, f"{names} distributed_data_parallel_config".split())]
    paths += [".experimental", *map(".experimental.{}".format, further.split())]
    for path in paths:
        module = importlib.import_module(base + path)
        assert module.__all__ and all(hasattr(module, name) for name in module.__all__)
    assert FullyShardedDataParallelV2 is FullyShardedDataParallel


@pytest.mark.parametrize("module", ELSEWHERE)
def test_names_that_are_elsewhere_say_where(module: str) -> None:
    """They can be imported, as code does that needs one of many; whoever calls one learns what to use instead."""
    found = importlib.import_module(f"megatron.core.distributed.fsdp.src.megatron_fsdp.{module}")
    for name, instead in ELSEWHERE[module].items():
        stand_in = getattr(found, name)
        assert isinstance(stand_in, type) and not hasattr(stand_in, "__wrapped__")
        for use in (stand_in, lambda stand_in=stand_in: stand_in.FORWARD):
            with pytest.raises(NotImplementedError) as error:
                use()
            assert str(error.value).endswith(f".{module}.{name} has no counterpart here: {instead}")
    assert not hasattr(found, "no_such_name")


def test_parameters_tell_how_tensor_parallelism_splits_them() -> None:
    for attributes, dim in (
        ({"_tensor_parallel_mode": "column"}, 0),
        ({"_tensor_parallel_mode": "row"}, 1),
        ({"tensor_model_parallel": True, "partition_dim": 1}, 1),
        ({"tensor_model_parallel": False, "partition_dim": 1}, None),
        ({"tensor_model_parallel": True, "partition_dim": -1}, None),
        ({}, None),
    ):
        parameter = nn.Parameter(torch.empty(2, 2))
        parameter.__dict__.update(attributes)
        assert utils.get_mcore_tensor_parallel_partition_dim(parameter) == dim
        assert utils.is_mcore_tensor_model_parallel(parameter) is (dim is not None)
        assert utils.is_mcore_tensor_parallel_duplicated(parameter) is (dim is None)
    outer = nn.Sequential(nn.Linear(2, 2))
    assert utils.is_submodule(outer[0], outer) and not utils.is_submodule(outer, outer)
    assert utils.is_submodule(outer, outer, strict=False) and utils.find_megatron_fsdp(outer) is None


def test_layers_tell_how_tensor_parallel_ranks_share_their_parameters() -> None:
    """By class name, else by attributes, as Megatron-Core's wrapper does for layers of other libraries."""

    def layer(kind: str, **attributes: Any) -> nn.Module:
        module: nn.Module = type(kind, (nn.Linear,), {})(2, 2)
        for name, value in attributes.items():
            setattr(module, name, value)
        return module

    for module, expected in (
        (layer("ColumnParallelLinear"), ("column", "column")),
        (layer("RowParallelLinear"), ("row", "replicated")),
        (layer("RMSNorm"), ("replicated", "replicated")),
        (layer("MyNorm"), ("replicated", "replicated")),
        (layer("TELinear", parallel_mode="row"), ("row", "replicated")),
        (layer("TELinear"), ("replicated", "replicated")),
        (layer("Mine", tensor_model_parallel=True, partition_dim=0), ("column", "column")),
        (layer("Mine", tensor_model_parallel=True, partition_dim=1), ("row", "replicated")),
        (layer("Mine", tensor_model_parallel=False), ("replicated", "replicated")),
        (layer("Mine"), (None, None)),
    ):
        FullyShardedDataParallelV2._annotate_tensor_parallelism(module)
        modes = tuple(
            getattr(module, name)._tensor_parallel_mode if expected[0] else None for name in ("weight", "bias")
        )
        assert modes == expected, type(module).__name__
        assert hasattr(module.weight, "_tensor_parallel_mode") == (expected[0] is not None)
    fused = layer("TELayerNormColumnParallelLinear")
    detect = FullyShardedDataParallelV2._detect_parallelism_type
    assert (detect("layer_norm_weight", fused), detect("weight", fused)) == ("replicated", "column")

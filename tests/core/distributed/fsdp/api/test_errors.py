"""Calls that cannot work raise at once, and say what must hold, what was got and what to do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from megatron.core.distributed.fsdp import fully_shard, fully_shard_context, fully_shard_optimizer, microbatch
from megatron.core.distributed.fsdp.buffers.parameter_group import group_of
from megatron.core.distributed.fsdp.config.placement import strategy_placements
from megatron.core.distributed.fsdp.fsdp2 import fully_shard as fully_shard_2
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm, get_grad_norm
from tests.support.agreement import assert_same_gradients, assert_trains_alike, groups_of, shard
from tests.support.models import context_of, local_of, make_net, my_piece, shard_net
from tests.support.models import loss_of as net_loss
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


def test_fully_shard_before_init_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"must be initialised before fully_shard.*init_process_group\(\)"):
        fully_shard(nn.Linear(2, 2))


def test_a_module_without_units_has_no_microbatches() -> None:
    with (
        pytest.raises(ValueError, match="Linear must hold sharded modules, got none; call fully_shard"),
        microbatch(nn.Linear(2, 2)),
    ):
        pass


# (what is called, error, message). Each leaves the module as it was.
_REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a unit again": (lambda: fully_shard(shard(nn.Linear(2, 2))), ValueError, "must be called once.*which is a unit"),
    "a unit again, caught as FSDP2's callers do": (
        lambda: fully_shard(shard(nn.Linear(2, 2))),
        AssertionError,
        "Each distinct composable distributed API can only be applied to a module once",
    ),
    "a copy of a unit": (
        lambda: copy.deepcopy(shard(nn.Linear(2, 2))),
        AssertionError,
        "FSDP does not support deepcopy.*Copy the module before fully_shard",
    ),
    "symmetric memory and another transport": (
        lambda: fully_shard(nn.Linear(2, 2), use_symm_mem=True, transport="nccl"),
        ValueError,
        "use_symm_mem=True means transport='symm', got transport='nccl' as well",
    ),
    "a transport that does not exist": (
        lambda: fully_shard(nn.Linear(2, 2), transport="rdma"),  # type: ignore[arg-type]
        ValueError,
        "transport must be one of auto, nccl, symm, peer_copy, got 'rdma'",
    ),
    "an embedding that writes to its weight": (
        lambda: fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Embedding(5, 2, max_norm=1.0))),
        NotImplementedError,
        r"max_norm of 1 \(Embedding\) must be None, got 1\.0.*forward writes to its weight",
    ),
    "an embedding bag that writes to its weight": (
        lambda: fully_shard(nn.EmbeddingBag(5, 2, max_norm=2)),
        NotImplementedError,
        r"max_norm of EmbeddingBag must be None, got 2",
    ),
    "an embedding with sparse gradients": (
        lambda: fully_shard(nn.Embedding(5, 2, sparse=True)),
        NotImplementedError,
        r"sparse of Embedding must be False, got True.*dense",
    ),
    "parameters without a shape": (
        lambda: fully_shard(nn.Sequential(nn.LazyLinear(3))),
        ValueError,
        r"weight of 0 \(LazyLinear\) must have a shape.*run a forward.*before fully_shard",
    ),
    "no name of a transport": (
        lambda: fully_shard(nn.Linear(2, 2), transport=["nccl"]),  # type: ignore[arg-type]
        TypeError,
        r"transport must be the name of one, got \['nccl'\]",
    ),
    "an empty name of a transport": (
        lambda: fully_shard(nn.Linear(2, 2), transport=""),  # type: ignore[arg-type]
        ValueError,
        "transport must be one of auto, nccl, symm, peer_copy, got ''",
    ),
    "zero for a transport": (
        lambda: fully_shard(nn.Linear(2, 2), transport=0),  # type: ignore[arg-type]
        TypeError,
        "transport must be the name of one, got 0",
    ),
    "a process group for a mesh": (
        lambda: fully_shard(nn.Linear(2, 2), dist.group.WORLD),  # type: ignore[arg-type]
        TypeError,
        r"mesh must be a DeviceMesh, got a process group.*DeviceMesh\.from_group",
    ),
    "a number for placements": (
        lambda: fully_shard(nn.Linear(2, 2), None, 3),  # type: ignore[arg-type]
        TypeError,
        "placements must be Placements or a strategy's name, got 3",
    ),
    "no strategy's name": (
        lambda: fully_shard(nn.Linear(2, 2), None, "zero3"),
        ValueError,
        "strategy must be one of .*, got 'zero3'",
    ),
    "FSDP2's number of ranks": (
        lambda: fully_shard(nn.Linear(2, 2), reshard_after_forward=3),
        ValueError,
        "reshard_after_forward as a number of ranks must be a factor of 2, got 3",
    ),
    "resharding that is no number": (
        lambda: fully_shard(nn.Linear(2, 2), reshard_after_forward="yes"),  # type: ignore[arg-type]
        ValueError,
        "reshard_after_forward must be a bool, or a number of ranks to reshard to, got 'yes'",
    ),
    "both sayings about resharding": (
        lambda: fully_shard(nn.Linear(2, 2), placements="optim", reshard_after_forward=True),
        ValueError,
        "placements say whether weights are resharded after forward",
    ),
    "no policy of FSDP2's for offloading": (
        lambda: fully_shard(nn.Linear(2, 2), offload_policy=True),
        TypeError,
        "offload_policy must be an OffloadPolicy, got True",
    ),
    "a dim that a parameter lacks": (
        lambda: fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda p: Shard(1)),
        ValueError,
        r"shard_placement_fn must name one of the 1 dims of bias, got S\(1\)",
    ),
    "what is no placement": (
        lambda: fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda p: 1),
        TypeError,
        "shard_placement_fn must return None, a Shard or a ShardPlacementResult, got 1 for weight",
    ),
    "parameters that are DTensors already": (
        lambda: fully_shard_2(nn.Linear(2, 2), dp_mesh_dims=object()),
        NotImplementedError,
        "dp_mesh_dims must be left out.*the data-parallel part of the mesh",
    ),
    "a cast to whole numbers": (
        lambda: fully_shard(nn.Linear(2, 2), mp_policy=fsdp2.MixedPrecisionPolicy(param_dtype=torch.int32)),
        TypeError,
        r"param_dtype must be None or one of .*bfloat16.*, got torch\.int32",
    ),
    "no policy": (
        lambda: fully_shard(nn.Linear(2, 2), mp_policy=torch.float16),
        TypeError,
        "must be a MixedPrecisionPolicy",
    ),
    "a module without forward": (
        lambda: fully_shard(nn.ModuleList([nn.Linear(2, 2)])),
        ValueError,
        "does not support containers that do not implement forward.*got a ModuleList; call it on each",
    ),
    "a divisor of nothing": (
        lambda: fully_shard(nn.Linear(2, 2), grad_divisor=0),
        ValueError,
        "grad_divisor must be positive, got 0",
    ),
    "an axis by number": (
        lambda: fully_shard(nn.Linear(2, 2), None, strategy_placements("optim", 1)),
        ValueError,
        "axis 1 must be an axis of the mesh, which has 1",
    ),
    "an axis by name": (
        lambda: fully_shard(nn.Linear(2, 2), None, strategy_placements("optim", "dp")),
        ValueError,
        "axis 'dp' must be among the mesh's None",
    ),
    "two axes without names": (
        lambda: fully_shard(nn.Linear(2, 2), init_device_mesh("cpu", (1, 2)), strategy_placements("optim", 1)),
        ValueError,
        "a mesh of 2 axes must name them.*mesh_dim_names",
    ),
    "complex numbers": (
        lambda: fully_shard(_WithParameter(torch.zeros(2, 2, dtype=torch.complex64))),
        TypeError,
        r"parameter weight must have one of the dtypes.*to be trained, got torch\.complex64",
    ),
    "a DTensor": (
        lambda: fully_shard(_WithParameter(distribute_tensor(torch.zeros(2, 2), init_device_mesh("cpu", (2,))))),
        ValueError,
        "of parameter weight, which is a DTensor, and that of fully_shard must be different axes of one mesh",
    ),
}


class _WithParameter(nn.Module):
    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)

    def forward(self) -> torch.Tensor:
        return self.weight


@CHECKS.on(2)
def what_cannot_be_sharded_is_refused() -> None:
    for name, (call, kind, message) in _REFUSED.items():
        try:
            with pytest.raises(kind, match=message):
                call()
        except BaseException as error:
            raise AssertionError(f"{name}: {error}") from error


@CHECKS.on(2)
def a_script_module_stays_as_it_was() -> None:
    """The class is checked before anything is sharded."""
    module = torch.jit.RecursiveScriptModule.__new__(torch.jit.RecursiveScriptModule)
    nn.Module.__init__(module)
    object.__setattr__(module, "forward", lambda: None)
    with pytest.raises(TypeError, match="class can be extended, got the ScriptModule RecursiveScriptModule"):
        fully_shard(module)


@CHECKS.on(2)
def hybrid_sharding_that_is_not_served_is_refused() -> None:
    from megatron.core.distributed.fsdp import Placements, hybrid_placements

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
    rows, whole, partial = Shard(0), Replicate(), Partial("avg")
    for parameter, gradient in (([whole, rows], [rows, rows]), ([rows, rows], [rows, rows])):
        placements = Placements(("outer", "inner"), parameter, gradient, [rows, rows])
        with pytest.raises(NotImplementedError, match=r"over the outer axis 'outer' weights must be Replicate\(\)"):
            fully_shard(nn.Linear(2, 2), mesh, placements)
    cube = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))
    three = Placements((0, 1, 2), [whole] * 3, [partial] * 3, [whole] * 3)
    with pytest.raises(NotImplementedError, match=r"or an outer and an inner one, are served, got \(0, 1, 2\)"):
        fully_shard(nn.Linear(2, 2), cube, three)
    for axes in ((1, 0), ("inner", "outer"), (0, 0)):
        with pytest.raises(ValueError, match="in the mesh's order, outermost first, got axes"):
            fully_shard(nn.Linear(2, 2), mesh, hybrid_placements("optim", axes=axes))
    with pytest.raises(ValueError, match="outer strategy must be one of no_shard, optim, got 'optim_grads'"):
        hybrid_placements("optim", "optim_grads")


def _aliased(view: Callable[[torch.Tensor], torch.Tensor]) -> nn.Sequential:
    """Return two layers of 4 x 4, the second one's weight a view of the first one's."""
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight.data = view(first.weight.data)
    return nn.Sequential(first, second)


_VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the same": lambda weight: weight,
    "transposed": lambda weight: weight.t(),
    "a slice": lambda weight: weight[1:3],
    "flat": lambda weight: weight.view(-1)[3:7],
    "every second column": lambda weight: weight[:, ::2],
    "other bytes": lambda weight: weight.view(torch.bfloat16),
}
_WAYS: dict[str, Callable[[nn.Sequential], object]] = {
    "one unit": fully_shard,
    "a unit and its root": lambda pair: (fully_shard(pair[0]), fully_shard(pair)),
    "two units": lambda pair: (fully_shard(pair[1]), fully_shard(pair[0])),
    "a list": lambda pair: fully_shard([pair[0], pair[1]]),
}


@CHECKS.on(1)
def parameters_that_share_memory_are_refused() -> None:
    """FSDP2 refuses the transposed one, and lets the others drift apart."""
    for view in _VIEWS.values():
        for way, call in _WAYS.items():
            with pytest.raises(NotImplementedError, match=r"weight must not share memory.*Make them one parameter"):
                call(_aliased(view))
                raise AssertionError(way)
    with torch.device("meta"):
        unfilled = _aliased(lambda weight: weight.t())
    with pytest.raises(NotImplementedError, match="must not share memory"):
        fully_shard(unfilled)
    for holder in (nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)):
        holder.register_buffer("copy", next(holder.parameters()).data[0])
        with pytest.raises(NotImplementedError, match=r"copy (and 0\.weight )?must not share memory"):
            fully_shard(holder)
    frozen = _aliased(lambda weight: weight)
    frozen[1].requires_grad_(False)
    fully_shard(frozen[0])
    fully_shard(frozen[1])  # as far as is known, another model that was loaded from the same tensors
    with pytest.raises(NotImplementedError, match="must not share memory"):
        fully_shard(frozen)
    for expanded in (torch.zeros(1, 4).expand(4, 4), torch.zeros(8).unfold(0, 4, 2)):
        with pytest.raises(NotImplementedError, match=r"weight must have memory for each element, got one of shape"):
            fully_shard(_WithParameter(expanded))


@CHECKS.on(1)
def parameters_beside_each_other_in_one_tensor_are_served() -> None:
    """Also where their rows take turns, or both are frozen, or the first one's unit is gone."""
    flat = torch.zeros(4, 8)
    pair = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    pair[0].weight.data, pair[1].weight.data = flat[:, :4], flat[:, 4:]
    fully_shard(pair[0])
    fully_shard(pair)
    frozen = _aliased(lambda weight: weight.t()).requires_grad_(False)
    fully_shard(frozen)
    state = nn.Linear(4, 4).state_dict()
    for _ in range(2):
        another = nn.Linear(4, 4)
        another.load_state_dict(state, assign=True)
        fully_shard(another.requires_grad_())
        del another


@CHECKS.on(2)
def a_mesh_must_hold_this_rank() -> None:
    mesh = DeviceMesh("cpu", [0])
    if dist.get_rank() == 0:
        fully_shard(nn.Linear(2, 2), mesh)
        return
    with pytest.raises(ValueError, match="the mesh must hold this rank, got rank 1"):
        fully_shard(nn.Linear(2, 2), mesh)


@CHECKS.on(2)
def a_mesh_must_fit_the_world() -> None:
    with pytest.raises(RuntimeError, match=r"(?i)mesh.*(size|world).*|.*world.*mesh"):
        fully_shard(nn.Linear(2, 2), init_device_mesh("cpu", (3,)))


@CHECKS.on(2)
def a_gather_group_must_hold_the_same_ranks() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with pytest.raises(ValueError, match=r"fsdp_group_ag must hold the mesh's ranks \[0, 1\] in that order, got"):
        fully_shard(nn.Linear(2, 2), fsdp_group_ag=alone)


@CHECKS.on(2)
def a_parameter_must_belong_to_one_unit() -> None:
    net = make_net()
    fully_shard(net)
    with pytest.raises(
        ValueError, match=r"parameter norm\.weight must belong to one unit.*call fully_shard on inner modules"
    ):
        fully_shard(net.blocks[0])
    net_loss(net, my_piece(0)).backward()


@CHECKS.on(2)
def tied_weights_must_share_their_mesh() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    fully_shard(first)
    with pytest.raises(ValueError, match=r"parameter weight is owned by a unit over .*the same mesh"):
        fully_shard(
            second, init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b")), strategy_placements("optim", "b")
        )


@CHECKS.on(2)
def tied_weights_need_one_root() -> None:
    """Two contexts would each count steps and reshard weights, regardless of the other."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.second(self.first(x))
            return out

    pair = Pair()
    fully_shard(pair.first)
    fully_shard(pair.second)
    with pytest.raises(RuntimeError, match="units that share weights must run under one root, got Linear"):
        pair(torch.randn(2, 5))
    assert_trains_alike(
        Pair,
        lambda m: shard(m, ("first", "second")),
        lambda model, rank, step: model(torch.full((2, 5), rank + step + 1.0)).square().mean(),
    )


@CHECKS.on(2)
def dtype_and_device_stay() -> None:
    net = shard_net(make_net())
    before = [local_of(parameter).clone() for parameter in net.parameters()]
    for harmless in (lambda: net.float(), lambda: net.to("cpu"), lambda: net.to(torch.float32)):
        harmless()
    assert all(group_of(parameter) is not None for parameter in net.parameters())
    optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    net_loss(net, my_piece(0)).backward()
    optimizer.step()
    assert not all(
        torch.equal(old, local_of(parameter)) for old, parameter in zip(before, net.parameters(), strict=True)
    )
    for harmful in (lambda m: m.to(torch.bfloat16), nn.Module.double, lambda m: m.to("meta")):
        with pytest.raises(RuntimeError, match=r"dtype and device of sharded parameters must stay.*before fully_shard"):
            harmful(net)
    net_loss(net, my_piece(1)).backward()


@CHECKS.on(2)
def a_sharded_module_is_not_copied_or_pickled() -> None:
    net = make_net()
    fully_shard(net.blocks[0])
    for whole in (net.blocks[0], net):
        with pytest.raises(NotImplementedError, match=r"FSDPBlock must not be copied.*before fully_shard"):
            copy.deepcopy(whole)
        with pytest.raises(
            NotImplementedError, match=r"FSDPBlock must not be copied or pickled.*state_dict.*save_checkpoint"
        ):
            pickle.dumps(whole)
    with pytest.raises(NotImplementedError, match=r"^FSDPBlock must not be copied"):
        copy.copy(net.blocks[0])


@CHECKS.on(2)
def parameters_from_before_are_not_used() -> None:
    net = make_net()
    old = list(net.parameters())
    optimizers = [torch.optim.SGD(old, lr=0.1), torch.optim.AdamW(old, fused=True)]
    shard_net(net)
    assert repr(old[0]).startswith("RetiredParameter(shape=[7, 5]")
    assert old[0].shape == (7, 5) and old[0].dtype is torch.float32 and old[0].requires_grad
    uses: list[Callable[[], object]] = [
        lambda: old[0] + 1,
        lambda: old[0].grad,
        lambda: old[0].data,
        lambda: nn.functional.linear(torch.ones(5), old[0]),
        lambda: copy.deepcopy(old[0]),
        *(optimizer.step for optimizer in optimizers),
        *(optimizer.zero_grad for optimizer in optimizers),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match=r"before fully_shard|once fully_shard has sharded it"):
            use()


@CHECKS.on(2)
def a_layer_outside_of_its_units_forward_is_told_so() -> None:
    layers: list[tuple[nn.Module, torch.Tensor]] = [
        (nn.Linear(6, 5), torch.ones(2, 6)),
        (nn.Embedding(10, 4), torch.arange(3)),
        (nn.LayerNorm(6), torch.ones(2, 6)),
        (nn.RMSNorm(6), torch.ones(2, 6)),
        (nn.GroupNorm(2, 6), torch.ones(2, 6)),
        (nn.Conv1d(3, 4, 1), torch.ones(2, 3, 5)),
        (nn.LSTM(3, 4), torch.ones(2, 3)),
    ]
    for layer, x in layers:
        unit: Any = fully_shard(nn.Sequential(layer))
        # Before and after the first forward, and after unshard() and a forward.
        for ends_unshard in (False, False, True):
            if ends_unshard:
                unit.unshard()
                unit(x)
            with pytest.raises(
                (RuntimeError, NotImplementedError),
                match=r"weights are whole in their unit's forward alone; call .*unshard\(\) it for that, which lasts until",
            ):
                layer(x)
            expected = unit(x)
        unit.unshard()
        torch.testing.assert_close(layer(x), expected)
        unit.reshard()
    unit = fully_shard_2(nn.Linear(5, 5, bias=False), reshard_after_forward=False)
    y, weight = unit(torch.ones(3, 5)), unit.weight
    uses: list[Callable[[], object]] = [
        lambda: y @ weight,
        lambda: y @ weight.t(),
        lambda: torch.addmm(y[0], y, weight),
        lambda: torch.einsum("bd,vd->bv", y, weight),
        lambda: torch.ones(5, 5) + weight,
        lambda: weight - torch.ones(5, 5),
        lambda: torch.ones(5, 5) / weight,
        lambda: torch.where(torch.ones(5, 5) > 0, torch.ones(5, 5), weight),
        lambda: weight[torch.arange(3)],
    ]
    for use in uses:
        with pytest.raises(
            (RuntimeError, NotImplementedError),
            match=r"in its forward \(a loss too\).*reshard_after_forward=False shows",
        ):
            use()
    unit.unshard()
    (y @ unit.weight).sum().backward()
    unit.reshard()
    assert weight.grad is not None


@CHECKS.on(2)
def weights_that_the_user_unsharded_get_gradients_without_any_forward() -> None:
    """A head that is a root of its own, whose weights a loss multiplies."""
    torch.manual_seed(3)
    plain: Any = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 7))
    body, head = map(copy.deepcopy, plain)
    fully_shard_2(body)
    fully_shard_2(head)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            head.unshard()
        nn.functional.linear(body(x), head.weight, head.bias).square().mean().backward()
        head.reshard()
        plain(x).square().mean().backward()
        for mine, its in ((body, plain[0]), (head, plain[1])):
            assert_same_gradients(mine, its)
        for one in (optimizer, theirs):
            one.step()
            one.zero_grad()


@CHECKS.on(2)
def data_parallelism_of_pytorch_around_sharded_modules_is_refused() -> None:
    for shape in ((4, 4), (5, 3)):
        module = fully_shard(nn.Linear(*shape))
        with pytest.raises(
            TypeError, match=r"DistributedDataParallel must get a module with whole parameters.*\(HSDP\)"
        ):
            nn.parallel.DistributedDataParallel(module)
        around = nn.Sequential(fully_shard(nn.Linear(*shape)), nn.Linear(2, 2))
        with pytest.raises(NotImplementedError, match=r"If DistributedDataParallel wraps the module: remove it"):
            nn.parallel.DistributedDataParallel(around)


@CHECKS.on(2)
def a_norm_over_two_meshes_is_refused_by_pytorch_and_computed_by_ours() -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))

    torch.manual_seed(0)
    plain = build()
    model = copy.deepcopy(plain)
    fully_shard(model[0])
    fully_shard(model[1], init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner")))
    for own in (plain, model):
        own(torch.ones(2, 6)).square().sum().backward()
    with pytest.raises(NotImplementedError, match=r"must lie on one mesh.*get_grad_norm.*clip_grad_by_total_norm"):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    norm = get_grad_norm(model.parameters())
    clip_grad_by_total_norm(model.parameters(), 0.1, norm)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    assert_same_gradients(model, plain)


@CHECKS.on(2)
def other_weights_of_a_functional_call_are_refused() -> None:
    model = fully_shard(nn.Linear(6, 5))
    for _ in range(2):
        others = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}
        with pytest.raises(RuntimeError, match=r"weight must stay the parameter.*torch\.func\.functional_call"):
            torch.func.functional_call(model, others, (torch.ones(2, 6),))
        model(torch.ones(2, 6)).sum().backward()


@CHECKS.on(2)
def gradients_of_sharded_parameters_come_by_backward_alone() -> None:
    """Forward computes with unsharded weights, so autograd finds no sharded one in the graph. The debug mode raises; FSDP2 does not."""
    message = "gradients of sharded parameters must be computed by backward.*weight, which is not in the graph"
    for shard_one in (fully_shard, fsdp2.fully_shard):
        model: Any = nn.Linear(6, 5)
        with fully_shard_context(debug=True) if shard_one is fully_shard else nullcontext():
            shard_one(model)
        parameters = list(model.parameters())
        with pytest.raises(RuntimeError, match="to not have been used in the graph"):
            torch.autograd.grad(model(torch.ones(2, 6)).sum(), parameters)
        for _ in range(2):  # without gradients from before, and with some
            for call in (
                lambda loss, params=parameters: torch.autograd.grad(loss, params, allow_unused=True),
                lambda loss, params=parameters: loss.backward(inputs=params),
            ):
                is_ours = shard_one is fully_shard
                with pytest.raises(RuntimeError, match=message) if is_ours else nullcontext():
                    call(model(torch.ones(2, 6)).sum())
            model.zero_grad()
            model(torch.ones(2, 6)).sum().backward()
            assert not is_ours or model.weight.grad.full_tensor().eq(2).all()
        x = torch.ones(2, 6, requires_grad=True)
        assert torch.autograd.grad(model(x).sum(), x)[0].shape == x.shape
        of_weight: Any = torch.autograd.grad(model.weight.square().sum(), model.weight)[0]
        assert torch.equal(of_weight.full_tensor(), 2 * model.weight.full_tensor())
    net = fully_shard(nn.Linear(6, 5))
    with pytest.raises(NotImplementedError, match=r"torch.func.grad.* are not served.*use backward\(\) and param.grad"):
        torch.func.grad(lambda x: net(x).sum())(torch.ones(2, 6))


@CHECKS.on(2)
def plain_values_written_to_sharded_weights_are_told_how() -> None:
    weight: Any = fully_shard(nn.Linear(6, 5)).weight
    whole = torch.ones(5, 6)
    before = weight.full_tensor().detach().clone()
    with (
        torch.no_grad(),
        pytest.raises(
            RuntimeError, match=r"got a plain one of shape .*distribute_tensor\(whole, parameter\.device_mesh"
        ),
    ):
        weight.copy_(whole)
    assert torch.equal(weight.full_tensor(), before)
    changed = before.clone()
    changed[[1, 3]] = 0
    with torch.no_grad():
        weight.copy_(distribute_tensor(changed, weight.device_mesh, weight.placements))
    assert torch.equal(weight.full_tensor(), changed)


# ---- order of calls -------------------------------------------------------------------------------------------------


@CHECKS.on(2)
def a_step_in_the_middle_of_a_pass_is_refused() -> None:
    net = shard_net(make_net())
    optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))

    def stepping(block: Any, x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(RuntimeError, match=r"step\(\) must come after forward and backward"):
            optimizer.step()
        out: torch.Tensor = block(x)
        out.register_hook(step_in_backward)
        return out

    def step_in_backward(grad: torch.Tensor) -> None:
        with pytest.raises(RuntimeError, match=r"step\(\) must come after forward and backward"):
            optimizer.step()

    net.around = stepping
    net_loss(net, my_piece(0)).backward()
    optimizer.step()


@CHECKS.on(2)
def reshard_in_the_middle_of_a_pass_waits_for_its_end() -> None:
    net: Any = shard_net(make_net())

    def resharding(block: Any, x: torch.Tensor) -> torch.Tensor:
        net.reshard()
        assert not isinstance(net.entry.weight, torch.distributed.tensor.DTensor)
        out: torch.Tensor = block(x)
        return out

    net.around = resharding
    net_loss(net, my_piece(0)).backward()
    assert not any(group.weights.is_unsharded for group in groups_of(net))


@CHECKS.on(2)
def gathering_ahead_of_the_step_is_refused() -> None:
    """The next forward would use weights from before the optimizer's step."""
    net = shard_net(make_net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        net_loss(net, my_piece(step)).backward()
        optimizer.step()
    assert context_of(net).planner.plan is not None
    net_loss(net, my_piece(3)).backward()
    context_of(net).prepare_forward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"written after start_param_sync.*fully_shard_optimizer"):
        net(my_piece(4)[0])
    net_loss(net, my_piece(4)).backward()


class Leaves(nn.Module):
    """Leaves a result on the module, and keys in a cache that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.out = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
        key = self.key(x).sin()
        cache.append(key)
        self.left = key.square().mean()
        return x + self.out(torch.stack(cache).mean(0)).tanh()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Leaves() for _ in range(3))

    def forward(self, x: torch.Tensor, caches: Any = None) -> torch.Tensor:
        for layer, cache in zip(self.layers, caches or ([], [], []), strict=True):
            x = layer(x, cache)
        return x


def _left_on_a_module(model: Any, x: torch.Tensor) -> torch.Tensor:
    model(x)
    left: torch.Tensor = model.layers[1].left
    return left


def _left_in_a_cache(model: Any, x: torch.Tensor) -> torch.Tensor:
    caches: list[list[torch.Tensor]] = [[], [], []]
    model(x, caches)
    out: torch.Tensor = model(x + 1, caches)
    return out.square().mean()


def _penalty(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return gradient.square().mean()


@CHECKS.on(2)
def a_backward_that_no_output_announced_names_the_unit_and_the_way_out() -> None:
    """Resharded weights must not be read; the debug mode names them. Where the unit keeps its weights, all is as without sharding."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    for loss_of, keeping, weights in (
        (_left_on_a_module, (1,), r"unit \S*layers\.1 \(\S*layers\.1\.key\.weight\)"),
        (_left_in_a_cache, (2,), r"unit \S*layers\.2 \(\S*layers\.2\.key\.weight\)"),
        (_penalty, None, ""),  # the backward that is recorded keeps its weights
    ):
        for keeps, debugs in (((), False), ((), True), *([] if keeping is None else [(keeping, False)])):
            torch.manual_seed(1)
            plain, model = Layers(), Layers()
            model.load_state_dict(plain.state_dict())
            with fully_shard_context(debug=True) if debugs else nullcontext():
                for index, layer in enumerate(model.layers):
                    fully_shard_2(layer, reshard_after_forward=index not in keeps)
                fully_shard_2(model)
            for net in (plain, model):
                net(x).square().mean().backward()
            if not keeps and weights:
                named = f"{weights} by another way.*reshard_after_forward=False.*" if debugs else ""
                with pytest.raises(RuntimeError, match=f"{named}inplace"):
                    loss_of(model, x).backward()
                continue
            for _ in range(2):
                for net in (plain, model):
                    loss_of(net, x).backward()
            assert_same_gradients(model, plain)


class _Positions(nn.Module):
    """Learned positions: forward returns the first rows of its weight."""

    def __init__(self, how: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.randn(7, 5)), how

    def forward(self, length: int) -> Any:
        return self.how(self.weight[:length])


class _Positioned(nn.Module):
    def __init__(self, how: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.positions, self.linear = _Positions(how), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.positions(len(x))
        return self.linear(x) + (rows if isinstance(rows, torch.Tensor) else rows[0])


@CHECKS.on(2)
def forward_returns_no_weight_that_is_resharded_after_it() -> None:
    """Its memory would be that of other weights when the caller reads it."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))

    def trained(how: Callable[[torch.Tensor], Any], **options: Any) -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(1)
        plain, model = _Positioned(how), _Positioned(how)
        model.load_state_dict(plain.state_dict())
        for module in (model.positions, model.linear, model):
            fully_shard_2(module, **options)
        for net in (plain, model):
            for _ in range(3):  # the second step follows the plan
                net(x).square().mean().backward()
        return model, plain

    for how in (lambda rows: rows, lambda rows: [rows.t().t()]):
        with pytest.raises(
            RuntimeError, match=r"forward of positions must not return positions\.weight, or a view.*clone"
        ):
            trained(how)
        assert_same_gradients(*trained(how, reshard_after_forward=False))
    assert_same_gradients(*trained(torch.clone))


@CHECKS.on(2)
def a_write_in_place_is_pytorchs_own_error() -> None:
    model = shard(nn.Sequential(nn.Linear(5, 5)), ("0",))
    out = model(torch.ones(2, 5)).exp()
    with pytest.raises(RuntimeError, match=r"^one of the variables needed for gradient computation has been modified"):
        (out.sum() + out.add_(1).sum()).backward()


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)

"""The engine's DTensors are of one class, and so is what operations make of them."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megatron.core.distributed.fsdp.dtensor.placements import RowShard
from megatron.core.distributed.fsdp.dtensor.uneven_dtensor import UnevenDTensor
from tests.support.models import loss_of, make_net, my_piece, shard_net
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)
# 3 rows of 2, cut behind the first one on two ranks.
PLACEMENT = RowShard(start=2, segment_numel=4, row_numel=2)
WHOLE = torch.arange(6.0).view(3, 2)


def _ours() -> Any:
    return distribute_tensor(WHOLE, init_device_mesh("cpu", (2,)), [PLACEMENT])


@CHECKS.on(2)
def parameters_gradients_and_states_are_ours() -> None:
    for strategy in ("optim_grads_params", "no_shard"):
        net = shard_net(make_net(1), strategy)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        loss_of(net, my_piece(0)).backward()
        optimizer.step()
        for parameter in net.parameters():
            assert isinstance(parameter, nn.Parameter) and isinstance(parameter, DTensor)
            assert type(parameter) is type(parameter.grad) is UnevenDTensor, strategy
            assert type(optimizer.state[parameter]["exp_avg"]) is UnevenDTensor, strategy


@CHECKS.on(2)
def a_loss_that_adds_a_sharded_number_is_told_to_add_a_plain_one() -> None:
    """Backward mixes the DTensor's gradient with plain tensors, and torch's error names neither cause nor remedy."""
    for strategy in ("optim_grads_params", "no_shard"):
        net = shard_net(make_net(1), strategy)
        penalty: Any = sum(parameter.abs().sum() for parameter in net.parameters())
        with pytest.raises(RuntimeError, match=r"must get only plain tensors .*`loss \+ penalty.full_tensor\(\)`"):
            (loss_of(net, my_piece(0)) + penalty).backward()


@CHECKS.on(2)
def each_way_to_make_an_uneven_tensor_makes_ours() -> None:
    """Torch names its own class in autograd and in redistribution; a tensor of that would be taken for an even one."""
    ours: Any = _ours()
    mesh, local = ours.device_mesh, ours.to_local()
    shape = {"shape": WHOLE.shape, "stride": WHOLE.stride()}
    made: dict[str, Any] = {
        "distribute_tensor": ours,
        "from_local": DTensor.from_local(local, mesh, [PLACEMENT], **shape),  # type: ignore[arg-type]
        "redistribute": distribute_tensor(WHOLE, mesh, [Shard(0)]).redistribute(placements=[PLACEMENT]),
        "operation": ours + 1,
        "operation with torch's": distribute_tensor(WHOLE, mesh, [Replicate()]) * ours,
        "torch's first": torch.add(distribute_tensor(WHOLE, mesh, [Replicate()]), ours),
        "list": torch._foreach_add([ours, ours], 1.0)[1],
    }
    for way in ("redistribute", "to_local"):
        leaf = _ours().requires_grad_()
        out = leaf.redistribute(placements=[Replicate()]) if way == "redistribute" else leaf.to_local()
        out.square().sum().backward()
        made[f"gradient of {way}"] = leaf.grad
    for name, tensor in made.items():
        assert type(tensor) is UnevenDTensor and tensor.placements == (PLACEMENT,), name
    assert torch.equal(made["gradient of redistribute"].full_tensor(), 2 * WHOLE)
    assert torch.equal(made["torch's first"].full_tensor(), 2 * WHOLE)


@CHECKS.on(2)
def from_local_carries_gradients_to_the_local_tensor() -> None:
    local = _ours().to_local().clone().requires_grad_()
    mesh = init_device_mesh("cpu", (2,))
    ours: Any = DTensor.from_local(local, mesh, [PLACEMENT], shape=WHOLE.shape, stride=WHOLE.stride())
    (ours * 3).sum().full_tensor().backward()
    assert local.grad is not None and torch.equal(local.grad, torch.full_like(local, 3.0))


@CHECKS.on(2)
def sums_and_norms_are_ours_and_right() -> None:
    ours: Any = _ours()
    for result, whole in ((ours.sum(), WHOLE.sum()), (ours.norm(), WHOLE.norm())):
        assert type(result) is UnevenDTensor
        torch.testing.assert_close(result.full_tensor(), whole)
    joined: Any = torch.cat([ours, ours])
    assert torch.equal(joined.full_tensor(), torch.cat([WHOLE, WHOLE]))


@CHECKS.on(2)
def copies_and_pickles_keep_the_class() -> None:
    ours: Any = _ours()
    stream = io.BytesIO()
    torch.save(ours, stream)
    stream.seek(0)
    for found in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(stream, weights_only=True)):
        assert type(found) is UnevenDTensor
        assert torch.equal((found * 2).full_tensor(), 2 * WHOLE)


@CHECKS.on(2)
def even_tensors_are_saved_as_torchs() -> None:
    """Files of whole weights, as of ``no_shard``, name no class of the engine for them."""
    weight: Any = next(shard_net(make_net(1), "no_shard").parameters()).detach()
    assert isinstance(weight, UnevenDTensor) and all(p.is_replicate() for p in weight.placements)
    data = pickle.dumps(weight)
    assert b"uneven_dtensor" not in data
    found = pickle.loads(data)
    assert type(found) is DTensor and torch.equal(found.full_tensor(), weight.full_tensor())


@CHECKS.on(2)
def a_custom_operation_without_a_rule_is_refused() -> None:
    """Also one that torch does not know: it must not see unequal parts as even ones."""
    with torch.library._scoped_library("uneven_dtensor_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        with pytest.raises(NotImplementedError):
            torch.ops.uneven_dtensor_test.twice(_ours())
    dist.barrier()


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)

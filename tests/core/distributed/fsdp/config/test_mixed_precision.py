"""Dtypes: what each default means, and that each buffer really has the dtype that it was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.distributed.fsdp import MixedPrecisionPolicy, Placements, fully_shard, fully_shard_optimizer
from megatron.core.distributed.fsdp.compat.module import MegatronFsdpPolicy
from megatron.core.distributed.fsdp.config.mixed_precision import GroupDtypes
from megatron.core.distributed.fsdp.src.megatron_fsdp import MegatronFSDP, experimental, fully_shard_model
from tests.support.agreement import groups_of
from tests.support.models import STRATEGY_NAMES, loss_of, make_net, my_piece, shard_net
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("policy", "own", "expected"),
    [
        (MixedPrecisionPolicy(), BF16, GroupDtypes(BF16, F32, F32, BF16)),
        (MixedPrecisionPolicy(), F32, GroupDtypes(F32, F32, F32, F32)),
        (MixedPrecisionPolicy(main_params_dtype=None), BF16, GroupDtypes(BF16, BF16, BF16, BF16)),
        (MixedPrecisionPolicy(main_grads_dtype=BF16), BF16, GroupDtypes(BF16, F32, BF16, BF16)),
        (MixedPrecisionPolicy(grad_comm_dtype=F32), BF16, GroupDtypes(BF16, F32, F32, F32)),
        (MixedPrecisionPolicy(F64, F32, F16), BF16, GroupDtypes(BF16, F64, F32, F16)),
        (MixedPrecisionPolicy(None, param_dtype=BF16), F32, GroupDtypes(BF16, F32, F32, BF16)),
    ],
)
def test_defaults(policy: MixedPrecisionPolicy, own: torch.dtype, expected: GroupDtypes) -> None:
    assert policy.resolve(own, trainable=True) == expected
    frozen = policy.param_dtype or own
    assert policy.resolve(own, trainable=False) == GroupDtypes(frozen, own, own, frozen)


@pytest.mark.parametrize(
    ("given", "own", "version_1", "version_2"),
    [
        ({}, BF16, GroupDtypes(BF16, F32, BF16, BF16), GroupDtypes(BF16, F32, BF16, BF16)),
        ({"main_params_dtype": None}, BF16, GroupDtypes(*[BF16] * 4), GroupDtypes(BF16, F32, BF16, BF16)),
        ({"main_grads_dtype": F32}, BF16, GroupDtypes(BF16, F32, F32, F32), GroupDtypes(BF16, F32, F32, BF16)),
        ({"grad_comm_dtype": F32}, BF16, GroupDtypes(BF16, F32, BF16, F32), GroupDtypes(BF16, F32, BF16, F32)),
        ({"main_params_dtype": F64}, F32, GroupDtypes(F32, F64, F32, F32), GroupDtypes(F32, F64, F32, F32)),
    ],
)
def test_defaults_under_megatron_fsdps_names(
    given: dict[str, Any], own: torch.dtype, version_1: GroupDtypes, version_2: GroupDtypes
) -> None:
    """As in Megatron-FSDP's source: main gradients have the parameter's dtype; only version 1 reduces in the main gradients' dtype."""
    policy = MixedPrecisionPolicy(**given)
    for version, expected in ((1, version_1), (2, version_2)):
        theirs = MegatronFsdpPolicy.of(policy, version)
        assert theirs.resolve(own, trainable=True) == expected
        assert theirs.resolve(own, trainable=False) == policy.resolve(own, trainable=False)


@pytest.mark.parametrize(
    "name", ["main_params_dtype", "main_grads_dtype", "grad_comm_dtype", "param_dtype", "output_dtype"]
)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_a_dtype_that_is_not_served_is_refused_by_name(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"{name} must be None or one of .*, got {dtype}"):
        MixedPrecisionPolicy(**{name: dtype})  # type: ignore[arg-type]


@CHECKS.on(2)
def every_buffer_has_its_dtype() -> None:
    policy = MixedPrecisionPolicy(main_params_dtype=F64, main_grads_dtype=F32, grad_comm_dtype=F16)
    for strategy in STRATEGY_NAMES:
        net = shard_net(make_net(1, dtype=BF16), strategy, policy=policy)
        seen: list[torch.dtype] = []
        for group in groups_of(net):
            reduce = group.grads.reduce

            def looking(*, group: Any = group, reduce: Any = reduce, seen: list[Any] = seen, **how: bool) -> None:
                seen.append(group.grads.input.buffer.local.dtype)
                reduce(**how)

            group.grads.reduce = looking  # type: ignore[method-assign]
            assert group.unsharded[0].dtype is BF16 and group.weights.model.local.dtype is BF16
            assert group.sharded[0].dtype is F64 and group.weights.main.local.dtype is F64
        loss_of(net, my_piece(0)).backward()
        assert set(seen) == {F16}
        for parameter in net.parameters():
            assert parameter.grad is not None and parameter.grad.dtype is F32


class _Reductions(TorchDispatchMode):
    """Records the dtypes of large tensors in collectives other than all-gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "gather" not in func.__name__:
            tensors = [one for one in pytree.tree_leaves(args) if isinstance(one, torch.Tensor)]
            self.dtypes |= {tensor.dtype for tensor in tensors if tensor.numel() >= _WIDTH**2}
        return func(*args, **(kwargs or {}))


_WIDTH = 32


def _train_step(model: nn.Module, module: nn.Module) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """Return the dtypes on the wire and of the gradients that the optimizer gets."""
    optimizer = fully_shard_optimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    loss = model(torch.ones(2, _WIDTH, dtype=BF16)).float().square().sum()
    with _Reductions() as reductions:
        loss.backward()
    if isinstance(model, MegatronFSDP):
        model.finish_grad_sync()
    grads = {parameter.grad.dtype for parameter in module.parameters() if parameter.grad is not None}
    optimizer.step()
    return reductions.dtypes, grads


@CHECKS.on(2)
def ported_code_reduces_in_the_dtypes_of_megatron_fsdp() -> None:
    """The same policy, or none, through each entry point: (dtypes on the wire, dtypes of main gradients)."""
    shard = Placements(["dp"], [Shard(0)], [Shard(0)], [Shard(0)])
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for given, version_1, version_2, own in (
        ({}, (BF16, BF16), (BF16, BF16), (BF16, F32)),
        ({"main_params_dtype": None}, (BF16, BF16), (BF16, BF16), (BF16, BF16)),
        ({"main_grads_dtype": F32}, (F32, F32), (BF16, F32), (BF16, F32)),
        ({"grad_comm_dtype": F32}, (F32, BF16), (F32, BF16), (F32, F32)),
    ):
        policy = MixedPrecisionPolicy(**given)
        for name, expected in (("version 1", version_1), ("version 2", version_2), ("own", own)):
            for policy_or_none in (policy,) if given else (policy, None):
                module = nn.Linear(_WIDTH, _WIDTH, dtype=BF16)
                model: nn.Module = module
                if name == "version 1":
                    model = fully_shard_model(module, mixed_precision_policy=policy_or_none)
                elif name == "version 2":
                    with experimental.fully_shard_context(torch.device("cpu")):
                        experimental.fully_shard(module, mesh, shard, policy_or_none)
                else:
                    fully_shard(module, mesh, shard, policy_or_none)
                found = _train_step(model, module)
                assert found == ({expected[0]}, {expected[1]}), (given, name, found)


@CHECKS.on(2)
def equal_dtypes_share_memory() -> None:
    """Where the model weight has the main weight's dtype it is the main weight: no second copy."""
    for strategy in STRATEGY_NAMES:
        for group in groups_of(shard_net(make_net(1), strategy)):
            same = group.weights.main.local.untyped_storage().data_ptr()
            assert group.weights.model.local.untyped_storage().data_ptr() == same, strategy


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)

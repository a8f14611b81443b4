"""Dtypes: what each default means, and that each buffer really has the dtype that it was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.distributed.fsdp import MixedPrecisionPolicy
from megatron.core.distributed.fsdp.config.mixed_precision import GroupDtypes
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
                seen.append(group.grads._input.local.dtype)
                reduce(**how)

            group.grads.reduce = looking  # type: ignore[method-assign]
            assert group.unsharded[0].dtype is BF16 and group.weights.model.local.dtype is BF16
            assert group.sharded[0].dtype is F64 and group.weights.main.local.dtype is F64
        loss_of(net, my_piece(0)).backward()
        assert set(seen) == {F16}
        for parameter in net.parameters():
            assert parameter.grad is not None and parameter.grad.dtype is F32


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

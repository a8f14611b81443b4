"""Writes of list operations count as writes to DTensors: what is computed from the weights follows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.core.distributed.fsdp import FlatAdamW, MixedPrecisionPolicy, microbatch
from megatron.core.distributed.fsdp.dtensor.dispatch import traits_of
from tests.support.models import Net, full, loss_of, make_net, my_piece, shard_net
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)
BF16 = torch.bfloat16

Write = Callable[[list[torch.Tensor]], Any]
WRITES: dict[str, Write] = {
    "one by one": lambda tensors: [tensor.mul_(0.5) for tensor in tensors],
    "_foreach_mul_": lambda tensors: torch._foreach_mul_(tensors, 0.5),
    "_foreach_mul_ of detached": lambda tensors: torch._foreach_mul_([tensor.detach() for tensor in tensors], 0.5),
    "_foreach_copy_": lambda tensors: torch._foreach_copy_(tensors, [tensor * 0.5 for tensor in tensors]),
}


@CHECKS.on(1)
def each_list_operation_counts_once() -> None:
    net = shard_net(make_net(1))
    parameters: list[torch.Tensor] = list(net.parameters())
    before = [parameter._version for parameter in parameters]
    with torch.no_grad():
        for write in (torch._foreach_zero_, torch._foreach_exp_, torch._foreach_neg_):
            write(parameters)
        torch._foreach_add_(parameters, parameters, alpha=2.0)
        torch._foreach_lerp_(parameters, parameters, 0.5)
        with pytest.raises(RuntimeError, match="tensor"):
            torch._foreach_add_(parameters, parameters[1:])  # writes nothing, and is counted again afterwards
        torch._foreach_zero_(parameters)
    assert [parameter._version - version for parameter, version in zip(parameters, before, strict=True)] == [6] * len(
        parameters
    )
    assert not any(full(parameter).any() for parameter in parameters)


def test_all_list_operations_that_write_are_found() -> None:
    names = set()
    for full_name in torch._C._dispatch_get_all_op_names():
        if full_name.startswith(("aten::_foreach_", "aten::_fused_")):
            name, _, overload = full_name.removeprefix("aten::").partition(".")
            operation = getattr(getattr(torch.ops.aten, name), overload or "default")
            if traits_of(operation).writes_list:
                names.add(str(operation))
    assert {"aten._foreach_copy_.default", "aten._foreach_mul_.Tensor", "aten._fused_adamw_.default"} <= names
    assert not {"aten._foreach_mul.Scalar", "aten._foreach_norm.Scalar"} & names


def _outputs_around_a_write(net: Net, write: Write) -> list[torch.Tensor]:
    """The outputs of two microbatches of a step, with a write between them, in the third step."""
    outputs = []
    for step in range(3):
        for index in range(2):
            with microbatch(net, is_first=index == 0, is_last=index == 1):
                out = net(my_piece(2 * step + index)[0].to(BF16))
                out.float().square().mean().backward()
            outputs.append(out.detach().clone())
            if index == 0 and step == 2:
                with torch.no_grad():
                    write(list(net.parameters()))
    return outputs


@CHECKS.on(2)
def bf16_weights_follow_writes_between_microbatches() -> None:
    for strategy in ("optim_grads_params", "no_shard"):
        expected = _outputs_around_a_write(shard_net(make_net(2, dtype=BF16), strategy), WRITES["one by one"])
        unwritten = _outputs_around_a_write(shard_net(make_net(2, dtype=BF16), strategy), lambda tensors: None)
        assert not torch.equal(expected[-1], unwritten[-1]), strategy
        for name in ("_foreach_mul_", "_foreach_mul_ of detached"):
            outputs = _outputs_around_a_write(shard_net(make_net(2, dtype=BF16), strategy), WRITES[name])
            assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True)), (strategy, name)


@CHECKS.on(2)
def a_write_that_only_all_ranks_could_follow_is_refused() -> None:
    for strategy in ("optim", "optim_grads"):
        for write in (WRITES["one by one"], WRITES["_foreach_mul_"]):
            net = shard_net(make_net(2, dtype=BF16), strategy)
            with pytest.raises(RuntimeError, match=r"must not be written between the microbatches.*is_first=True"):
                _outputs_around_a_write(net, write)
            net(my_piece(0)[0].to(BF16))  # a first microbatch brings them up to date


@CHECKS.on(2)
def remainders_of_weights_that_were_written_are_dropped() -> None:
    """After a write the fp32 weight is what was written, not that and the lower half of another number."""
    for name, write in WRITES.items():
        net = shard_net(make_net(2, dtype=BF16), policy=MixedPrecisionPolicy(main_params_dtype=None))
        optimizer = FlatAdamW(net.parameters(), lr=0.0, weight_decay=0.0, store_param_remainders=True)
        parameters: list[torch.Tensor] = list(net.parameters())
        for step in range(2):
            loss_of(net, my_piece(step)).backward()
            optimizer.param_groups[0]["lr"] = 0.01
            optimizer.step()
        with torch.no_grad():
            write(parameters)
        written = [full(parameter).float() for parameter in parameters]
        optimizer.param_groups[0]["lr"] = 0.0  # a step that changes nothing but what is stale
        loss_of(net, my_piece(2)).backward()
        optimizer.step()
        for parameter, expected in zip(parameters, written, strict=True):
            assert torch.equal(full(optimizer.main_weights(parameter)), expected), name


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)

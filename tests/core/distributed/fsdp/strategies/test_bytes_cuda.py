"""Parameters with hooks and frozen bytes on two GPUs, with NCCL and peer copy: as whole weights on one of them."""

from __future__ import annotations

import functools
import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer
from megatron.core.distributed.fsdp.codec.frozen_weights import FrozenWeights
from tests.support.float8_weights import fp8_batch, make_codec, make_fp8_net
from tests.support.hooked_tensors import hook
from tests.support.launch import run_ranks, served_transports
from tests.support.models import full

pytestmark = pytest.mark.gpu(2)
NUM_STEPS = 4


def _net(kind: str, recipe: Any) -> Any:
    net = make_fp8_net(make_codec(recipe) if kind == "frozen" else None).cuda()
    if kind == "hooked":
        hook(net)
    if kind == "frozen":
        for name, parameter in net.named_parameters():
            if name.endswith(("up.weight", "down.weight")):
                parameter.requires_grad_(False)
                parameter.fsdp_codec = make_codec(recipe)  # type: ignore[attr-defined]  # .cuda() made another one
    return net


def _train(kind: str, recipe: Any, strategy: str, transport: Any) -> tuple[list[float], list[torch.Tensor]]:
    net = _net(kind, recipe)
    policy = MixedPrecisionPolicy(grad_comm_dtype=torch.float32)
    for module in (*net.blocks, net):
        fully_shard(module, placements=strategy, transport=transport, mixed_precision_policy=policy)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = fully_shard_optimizer(torch.optim.SGD(trained, lr=0.25))
    losses = []
    for step in range(NUM_STEPS):
        features, classes = fp8_batch(step, 2)[dist.get_rank()]
        loss = torch.nn.functional.cross_entropy(net(features.cuda()).float(), classes.cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if kind == "frozen":
        groups = [group for block in net.blocks for group in block.parameter_groups]
        frozen = [group.weights for group in groups if isinstance(group.weights, FrozenWeights)]
        assert frozen and not any(weights.main.has_values for weights in frozen)
        weight: Any = net.blocks[0].up.weight
        before = full(weight).clone()
        with torch.no_grad():
            weight.mul_(2.0)
        features, _ = fp8_batch(0, 2)[dist.get_rank()]
        net(features.cuda())
        assert torch.equal(full(weight), 2.0 * before) and not any(own.main.has_values for own in frozen)
        for parameter in net.parameters():
            parameter.requires_grad_(True)
        net(features.cuda()).sum().backward()
        assert full(weight.grad).isfinite().all() and weight.dtype == torch.float32
    return losses, [full(parameter) for parameter in net.parameters()]


def _check_all() -> dict[str, str]:
    found = {}
    for kind, recipes in (("hooked", ("tensorwise",)), ("frozen", ("delayed", "tensorwise", "blockwise"))):
        for recipe in recipes:
            try:
                # Two ranks' gradients have one sum, whatever the strategy and the transport.
                expected = _train(kind, recipe, "no_shard", "nccl")
                sharded = [("optim_grads_params", transport) for transport in served_transports("nccl", "peer_copy")]
                for strategy, transport in (*sharded, ("optim", "nccl")):
                    losses, weights = _train(kind, recipe, strategy, transport)
                    assert losses == expected[0], (strategy, transport, losses, expected[0])
                    assert all(map(torch.equal, weights, expected[1])), (strategy, transport)
            except Exception:
                found[f"{kind}-{recipe}"] = traceback.format_exc()
    return found


@functools.cache
def _failures() -> dict[str, str]:
    found: dict[str, str] = {}
    for failures in run_ranks(2, _check_all, backend="nccl"):
        found.update(failures)
    return found


@pytest.mark.parametrize("name", ["hooked-tensorwise", "frozen-delayed", "frozen-tensorwise", "frozen-blockwise"])
def test_strategies_and_transports_agree(name: str) -> None:
    failure = _failures().get(name, "")
    assert not failure, failure

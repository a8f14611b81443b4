"""State in the host's memory, on GPUs: the same training, less memory on the device, copies on streams of their own."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp import FlatAdamW, MixedPrecisionPolicy, fully_shard
from megatron.core.distributed.fsdp.config.placement import strategy_placements
from tests.support.launch import run_ranks

_WIDTH = 512


def _net(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(main_params_dtype=None)
    blocks = [nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH), nn.GELU()) for _ in range(6)]
    net = nn.Sequential(*blocks, nn.Linear(_WIDTH, 8)).to("cuda", dtype)
    placements = strategy_placements("optim_grads_params")
    for block in blocks:
        fully_shard(block, placements=placements, mixed_precision_policy=policy)
    return fully_shard(net, placements=placements, mixed_precision_policy=policy)


def _train(dtype: torch.dtype, **options: Any) -> tuple[list[float], list[torch.Tensor], int]:
    """Return losses, main weights on the host, and the bytes of optimizer state on the device."""
    net = _net(dtype)
    before = torch.cuda.memory_allocated()
    optimizer = FlatAdamW(
        net.parameters(), lr=1e-3, weight_decay=0.1, store_param_remainders=dtype == torch.bfloat16, **options
    )
    state_nbytes = torch.cuda.memory_allocated() - before
    losses = []
    for step in range(8):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = net(torch.randn(64, _WIDTH, generator=generator).to("cuda", dtype)).float().square().mean()
        loss.backward()
        found_inf = torch.full((1,), float(step == 3), device="cuda")
        optimizer.step(grad_factor=torch.full((1,), 0.5, device="cuda"), found_inf=found_inf)
        optimizer.zero_grad()
        losses.append(loss.detach())
    weights = [optimizer.main_weights(p)._local_tensor.cpu().clone() for p in net.parameters()]
    return [float(loss) for loss in losses], weights, state_nbytes


def _compare() -> None:
    # Weights in bf16 that round the other way make gradients of their own.
    for dtype, allowed in ((torch.float32, 2e-3), (torch.bfloat16, 2e-2)):
        wanted, weights, resident = _train(dtype)
        variants: list[dict[str, Any]] = [
            {"offload_fraction": 1.0},
            {"offload_fraction": 1.0, "overlaps_forward": True, "overlaps_host_updates": True},
            {"offload_fraction": 0.5, "overlaps_forward": True, "overlaps_host_updates": True},
            {"offload_fraction": 1.0, "pins_gradients": False, "pins_weights": False},
        ]
        found = [_train(dtype, **options) for options in variants]
        for losses, own, nbytes in found:
            # Torch's fused kernel on the host rounds at other places than the kernel on the device.
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=2e-3, atol=1e-5)
            for index, (mine, other) in enumerate(zip(own, weights, strict=True)):
                apart, norm = (mine.float() - other.float()).norm(), other.float().norm()
                assert apart <= allowed * norm + 1e-5, (dtype, index, apart, norm)
            assert nbytes < 0.7 * resident
        assert found[0][:1] == found[1][:1], "whatever runs beside what"
        assert all(torch.equal(*pair) for pair in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.gpu(2)
def test_state_on_the_host_trains_as_state_on_the_device() -> None:
    run_ranks(2, _compare, backend="nccl")


def _beside() -> None:
    """With overlap, ``step`` returns before the thread has updated the last unit; the next forward then waits for it."""
    torch.manual_seed(0)
    net = _net(torch.bfloat16)
    optimizer = FlatAdamW(
        net.parameters(),
        lr=1e-3,
        store_param_remainders=True,
        overlaps_forward=True,
        offload_fraction=1.0,
        overlaps_host_updates=True,
    )
    host = optimizer._host
    assert host is not None
    update, entered = host._update, threading.Event()
    may_end: list[bool] = []

    def slow(*arguments: Any) -> None:
        entered.wait(10.0)
        may_end.append(True)
        update(*arguments)

    host._update = slow  # type: ignore[method-assign, assignment]
    x = torch.randn(64, _WIDTH, device="cuda", dtype=torch.bfloat16)
    net(x).float().sum().backward()
    optimizer.step()
    assert may_end == [], "the thread waits, and the step has returned"
    entered.set()
    before = net(x).detach().clone()
    torch.cuda.synchronize()
    optimizer.synchronize()
    assert torch.equal(net(x).detach(), before), "the forward saw the weights of after the update"


@pytest.mark.gpu(1)
def test_updates_run_beside_the_next_forward() -> None:
    run_ranks(1, _beside, backend="nccl")

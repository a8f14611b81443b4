"""``FlatAdamW`` with state in the host's memory: the same training, checkpoints that load across, and what it waits for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp import (
    FlatAdamW,
    MixedPrecisionPolicy,
    fully_shard,
    load_checkpoint,
    save_checkpoint,
)
from megatron.core.distributed.fsdp.config.placement import strategy_placements
from megatron.core.distributed.fsdp.flat_optimizer.flat_state import HostState
from tests.support.models import loss_of, make_net, my_piece, shard_net
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)
FP32, BF16 = torch.float32, torch.bfloat16
# (dtype of the model, its policy, whether main weights are kept in two halves)
KINDS = {
    "fp32": (FP32, None, False),
    "bf16": (BF16, None, False),
    "two halves": (BF16, MixedPrecisionPolicy(main_params_dtype=None), True),
}
# Torch's fused kernel rounds at other places than the operations that update on the device.
NOISE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}


def _net(kind: str, strategy: str = "optim_grads_params") -> Any:
    torch.manual_seed(0)
    dtype, policy, _ = KINDS[kind]
    blocks = [nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.GELU()) for _ in range(3)]
    net = nn.Sequential(*blocks, nn.Linear(12, 5)).to(dtype)
    for block in blocks:
        fully_shard(block, placements=strategy_placements(strategy), mixed_precision_policy=policy)
    return fully_shard(net, placements=strategy_placements(strategy), mixed_precision_policy=policy)


def _optimizer(net: nn.Module, kind: str, fraction: float, **options: Any) -> FlatAdamW:
    decayed = [p for p in net.parameters() if p.dim() > 1]
    others = [p for p in net.parameters() if p.dim() == 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return FlatAdamW(
        groups, lr=0.02, weight_decay=0.1, store_param_remainders=KINDS[kind][2], offload_fraction=fraction, **options
    )


def _train(net: Any, optimizer: FlatAdamW, steps: range, *, overflow_at: int | None = None) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        inputs = torch.randn(4, 12, generator=generator).to(net.parameter_groups[0].dtypes.compute)
        loss = net(inputs).float().square().mean()
        loss.backward()
        found_inf = torch.full((1,), float(step == overflow_at))
        optimizer.param_groups[0]["lr"] = 0.02 / (1 + step)
        optimizer.step(grad_factor=torch.tensor(0.5 * 4**step), found_inf=None if overflow_at is None else found_inf)
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _main_weights(net: nn.Module, optimizer: FlatAdamW) -> list[torch.Tensor]:
    return [optimizer.main_weights(p).full_tensor() for p in net.parameters()]


def _state(net: nn.Module, optimizer: FlatAdamW, key: str) -> list[torch.Tensor]:
    optimizer.synchronize()
    found = [optimizer.state[p][key] for p in net.parameters()]
    return [value.full_tensor() if isinstance(value, DTensor) else value.clone() for value in found]


@CHECKS.on(1, 2)
def state_on_the_host_trains_as_state_on_the_device() -> None:
    """Whatever part of it is there, whether updates run beside the next forward, and over a step that is skipped."""
    for kind in KINDS:
        for overflow_at in (None, 1):
            net = _net(kind)
            resident = _optimizer(net, kind, 0.0)
            wanted = _train(net, resident, range(4), overflow_at=overflow_at)
            for fraction in (0.4, 1.0):
                for overlaps in (False, True):
                    options = {"overlaps_forward": overlaps, "overlaps_host_updates": overlaps}
                    other = _net(kind)
                    optimizer = _optimizer(other, kind, fraction, **options)
                    losses = _train(other, optimizer, range(4), overflow_at=overflow_at)
                    tolerance = NOISE if kind == "fp32" else {"rtol": 2e-2, "atol": 1e-3}
                    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), **tolerance)
                    for pair in zip(_main_weights(other, optimizer), _main_weights(net, resident), strict=True):
                        torch.testing.assert_close(*pair, **(NOISE if kind == "fp32" else {"rtol": 0.1, "atol": 5e-3}))
                    assert _state(other, optimizer, "step") == _state(net, resident, "step")
                    assert _state(other, optimizer, "step")[0] == (4.0 if overflow_at is None else 3.0)


@CHECKS.on(1, 2)
def units_and_parameters_without_gradients_are_left_alone() -> None:
    nets = [shard_net(make_net(3)) for _ in range(2)]
    optimizers = [
        FlatAdamW(net.parameters(), lr=0.02, weight_decay=0.1, offload_fraction=fraction)
        for net, fraction in zip(nets, (0.0, 1.0), strict=True)
    ]
    for step, order in enumerate(([0, 1], [0, 1, 2], [2, 0], [0, 1, 2])):
        for net, optimizer in zip(nets, optimizers, strict=True):
            net.order = order
            optimizer.zero_grad()
            loss_of(net, my_piece(step)).backward()
            if step == 1:
                net.head.bias.grad = None
            optimizer.step()
    for pair in zip(*(_main_weights(net, opt) for net, opt in zip(nets, optimizers, strict=True)), strict=True):
        torch.testing.assert_close(*pair, **NOISE)
    steps = [_state(net, optimizer, "step") for net, optimizer in zip(nets, optimizers, strict=True)]
    assert steps[0] == steps[1] and set(map(float, steps[0])) == {3.0, 4.0}


@CHECKS.on(1)
def it_is_torchs_fused_adamw() -> None:
    net = _net("fp32")
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.GELU()) for _ in range(3)]
    reference = nn.Sequential(*blocks, nn.Linear(12, 5))
    optimizer = FlatAdamW(net.parameters(), lr=0.02, weight_decay=0.1, offload_fraction=1.0)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.02, weight_decay=0.1, fused=True)
    for step in range(4):
        pairs: list[tuple[nn.Module, torch.optim.Optimizer]] = [(net, optimizer), (reference, theirs)]
        for model, update in pairs:
            inputs = torch.randn(4, 12, generator=torch.Generator().manual_seed(step))
            model(inputs).square().mean().backward()
            update.step()
            update.zero_grad()
    for mine, other in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), other.detach(), rtol=1e-6, atol=1e-7)


@CHECKS.on(2)
def fractions_are_of_whole_units_and_the_last_ones() -> None:
    net = _net("fp32")
    for fraction, number in ((0.0, 0), (0.1, 1), (0.5, 3), (1.0, 4)):
        optimizer = _optimizer(net, "fp32", fraction)
        on_host = [isinstance(state, HostState) for state in optimizer._states]
        assert sum(on_host) == number and on_host == sorted(on_host), (fraction, on_host)
    assert all(group.state_nbytes.on_device == 0 < group.state_nbytes.on_host for group in optimizer.groups)
    with pytest.raises(ValueError, match=r"offload_fraction must be from 0 to 1, got 1\.5"):
        _optimizer(net, "fp32", 1.5)


@CHECKS.on(2)
def checkpoints_load_across_and_go_on_bit_by_bit() -> None:
    """Saved from the host's memory and loaded to the device, the reverse, and to the same place."""
    folder = _shared_folder()
    for kind in KINDS:
        for saved, loaded in ((1.0, 0.0), (0.0, 1.0), (0.5, 0.5), (1.0, 1.0)):
            net = _net(kind)
            optimizer = _optimizer(net, kind, saved)
            _train(net, optimizer, range(3))
            path = folder / f"{kind.replace(' ', '')}-{saved}-{loaded}"
            save_checkpoint(net, optimizer, path)
            other = _net(kind)
            again = _optimizer(other, kind, loaded)
            _train(other, again, range(5, 6))
            load_checkpoint(other, again, path)
            for pair in zip(_main_weights(other, again), _main_weights(net, optimizer), strict=True):
                assert torch.equal(*pair), (kind, saved, loaded)
            for key in ("exp_avg", "exp_avg_sq", "step"):
                for pair in zip(_state(other, again, key), _state(net, optimizer, key), strict=True):
                    assert torch.equal(*pair), (kind, key)
            if saved == loaded:
                assert _train(other, again, range(3, 6)) == _train(net, optimizer, range(3, 6)), (kind, saved)
            assert not any("param_remainder" in state for state in again.state.values()) or loaded != 1.0
            twin = _optimizer(_net(kind), kind, loaded)
            twin.load_state_dict(optimizer.state_dict())
            for key in ("exp_avg", "exp_avg_sq", "step"):
                for pair in zip(_values(twin, key), _values(optimizer, key), strict=True):
                    assert torch.equal(*pair), (kind, key)


def _values(optimizer: FlatAdamW, key: str) -> list[torch.Tensor]:
    optimizer.synchronize()
    found = [state[key] for state in optimizer.state.values()]
    return [value.full_tensor() if isinstance(value, DTensor) else value for value in found]


def _shared_folder() -> Path:
    import tempfile

    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    return Path(names[0])


@CHECKS.on(2)
def weights_that_others_write_are_those_that_train_on() -> None:
    for kind in KINDS:
        net = _net(kind)
        optimizer = _optimizer(net, kind, 1.0, overlaps_forward=True, overlaps_host_updates=True)
        _train(net, optimizer, range(2))
        optimizer.synchronize()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(0.25)
        for weights in _main_weights(net, optimizer):
            assert (weights == 0.25).all()
        folder = _shared_folder()
        first = _net(kind)
        save_checkpoint(first, None, folder / "weights")
        load_checkpoint(net, None, folder / "weights")
        for parameter in optimizer.param_groups[0]["params"]:
            optimizer.state[parameter]["exp_avg"]._local_tensor.zero_()
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.0
        net(torch.ones(1, 12, dtype=KINDS[kind][0])).float().sum().backward()
        optimizer.step()
        optimizer.synchronize()
        for mine, other in zip(net.parameters(), first.parameters(), strict=True):
            assert torch.equal(mine.full_tensor(), other.full_tensor()), kind


@CHECKS.on(2)
def what_users_put_into_the_state_is_used() -> None:
    """In the host's memory as on the device, with the weights as they were written last."""
    for kind in KINDS:
        results = []
        for fraction in (0.0, 1.0):
            net = _net(kind)
            optimizer = _optimizer(net, kind, fraction)
            _train(net, optimizer, range(2))
            optimizer.synchronize()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.mul_(0.5)
            optimizer.state.clear()
            _train(net, optimizer, range(2, 4))
            optimizer.synchronize()
            results.append(_main_weights(net, optimizer) + [own["step"] for own in optimizer.state.values()])
        for device, host in zip(*results, strict=True):
            torch.testing.assert_close(device, host, **(NOISE if kind == "fp32" else {"rtol": 0.1, "atol": 5e-3}))


@CHECKS.on(2)
def an_error_on_the_host_is_raised_where_it_is_waited_for() -> None:
    net = _net("fp32")
    optimizer = _optimizer(net, "fp32", 1.0, overlaps_forward=True, overlaps_host_updates=True)
    assert optimizer._host is not None
    optimizer._host._update = _fails  # type: ignore[method-assign, assignment]
    net(torch.ones(2, 12)).sum().backward()
    optimizer.step()
    with pytest.raises(MemoryError, match="planted"):
        net(torch.ones(2, 12))


def _fails(*_: Any) -> None:
    raise MemoryError("planted")


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)

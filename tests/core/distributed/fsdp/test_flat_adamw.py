"""``FlatAdamW`` is ``torch.optim.AdamW`` to the last bit on the CPU, whatever is sharded, grouped, clipped or left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.distributed.fsdp import FlatAdamW, fully_shard_optimizer
from megatron.core.distributed.fsdp.flat_norm import clip_factor
from tests.core.distributed.fsdp.agreement import groups_of
from tests.core.distributed.fsdp.models import (
    STRATEGY_NAMES,
    Net,
    loss_of,
    make_net,
    my_piece,
    shard_net,
)
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)
BF16 = torch.bfloat16


def _groups(net: nn.Module) -> list[dict[str, Any]]:
    """Vectors are not decayed, and the head has a rate of its own."""
    named = list(net.named_parameters())
    return [
        {"params": [p for name, p in named if p.dim() == 1 and "head" not in name], "weight_decay": 0.0},
        {"params": [p for name, p in named if p.dim() > 1 and "head" not in name], "betas": (0.8, 0.95)},
        {"params": [p for name, p in named if "head" in name], "lr": 0.02, "eps": 1e-6},
    ]


def _torch_adamw(net: nn.Module) -> torch.optim.Optimizer:
    return fully_shard_optimizer(torch.optim.AdamW(_groups(net), lr=0.01, weight_decay=0.1, foreach=True))


def _flat_adamw(net: nn.Module, **options: Any) -> FlatAdamW:
    return FlatAdamW(_groups(net), lr=0.01, weight_decay=0.1, **options)


def _train(net: Net, optimizer: torch.optim.Optimizer, steps: range, max_norm: float | None = None) -> list[float]:
    """Losses of the steps; the rates change from step to step."""
    losses = []
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9 if step else 1.0
        optimizer.zero_grad()
        loss = loss_of(net, my_piece(step))
        loss.backward()
        losses.append(loss.item())
        if isinstance(optimizer, FlatAdamW):
            factor = None if max_norm is None else clip_factor(optimizer.grad_norm(), max_norm)
            optimizer.step(grad_factor=factor)
        else:
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm, foreach=False)
            optimizer.step()
    return losses


def _poison_padding(net: nn.Module) -> None:
    """Afterwards what lies between the tensors of main weights is not a number."""
    for group in groups_of(net):
        kept = [local.clone() for local in (group.main_weight.view(i) for i in range(len(group.parameters)))]
        group.main_weight.local.data.fill_(float("nan"))
        for index, local in enumerate(kept):
            group.main_weight.view(index).data.copy_(local)


def _assert_same(ours: nn.Module, theirs: nn.Module, what: str = "") -> None:
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.to_local(), other.to_local()), f"{what} {name}"  # type: ignore[attr-defined]


@CHECKS.on(1, 2, 4)
def it_equals_torch_adamw_bit_for_bit() -> None:
    for strategy in STRATEGY_NAMES:
        for dtype in (torch.float32, BF16):
            nets = [shard_net(make_net(2, dtype=dtype), strategy) for _ in range(2)]
            losses = [
                _train(net, make(net), range(5)) for net, make in zip(nets, (_flat_adamw, _torch_adamw), strict=True)
            ]
            assert losses[0] == losses[1], strategy
            _assert_same(*nets, strategy)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)

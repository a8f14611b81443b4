"""Optimizers of ``bitsandbytes`` over sharded models: as over whole ones, saved and loaded; on two ranks."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from megatron.core.distributed.fsdp import fully_shard_optimizer
from megatron.core.distributed.fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron.core.distributed.fsdp.fsdp2 import fully_shard
from tests.support.rank_checks import RankChecks
from tests.support.shared_folder import shared_folder

bitsandbytes = pytest.importorskip("bitsandbytes")

CHECKS = RankChecks(__name__)
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW8bit": {"lr": 1e-2, "weight_decay": 0.1},
    "AdamW": {"lr": 1e-2},
    "PagedAdamW8bit": {"lr": 1e-2},
    "Lion8bit": {"lr": 1e-3},
}


def _build() -> nn.Module:
    torch.manual_seed(5)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(64, 3))


def _sharded() -> Any:
    model = _build()
    for block in list(model.children())[:2]:
        fully_shard(block)
    return fully_shard(model)


def _optimizer(name: str, model: nn.Module) -> Any:
    return fully_shard_optimizer(getattr(bitsandbytes.optim, name)(model.parameters(), **OPTIMIZERS[name]))


def _train(model: nn.Module, optimizer: Any, steps: range, ranks: list[int]) -> list[float]:
    losses = []
    for _ in steps:
        loss = torch.zeros(())
        for rank in ranks:
            inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
            loss = loss + (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean() / len(ranks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _whole(model: nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]


@CHECKS.on(2)
def training_is_that_of_a_whole_model() -> None:
    """Weights of 4,096 elements and more have 8-bit state, in blocks that begin where a rank's rows do."""
    warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU")
    for name in OPTIMIZERS:
        plain, model = _build(), _sharded()
        theirs, ours = (
            getattr(bitsandbytes.optim, name)(plain.parameters(), **OPTIMIZERS[name]),
            _optimizer(name, model),
        )
        both = [0, 1]
        expected = _train(plain, theirs, range(12), both)
        own = torch.tensor(_train(model, ours, range(12), [dist.get_rank()]))
        dist.all_reduce(own)
        torch.testing.assert_close(own / 2, torch.tensor(expected), rtol=0.02, atol=1e-3, msg=name)
        assert expected[-1] < 0.9 * expected[0], name
        dtypes = {p.shape: ours.state[p]["state1"].dtype for p in model.parameters()}
        in_bits = torch.uint8 if name.endswith("8bit") else torch.float32
        assert dtypes[torch.Size([128, 64])] == in_bits and dtypes[torch.Size([128])] == torch.float32


@CHECKS.on(2)
def state_is_saved_and_loaded() -> None:
    """By checkpoints of the engine, and by torch's: training goes on with what it had."""
    model = _sharded()
    optimizer = _optimizer("AdamW8bit", model)
    _train(model, optimizer, range(3), [dist.get_rank()])
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = copy.copy(optimizer.state)
    before = {p: {k: v.clone() if torch.is_tensor(v) else v for k, v in state[p].items()} for p in state}
    with shared_folder() as path:
        folder = Path(path)
        save_checkpoint(model, optimizer, folder / "ours")
        dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder / "torch")
        _train(model, optimizer, range(3, 5), [dist.get_rank()])
        expected = _whole(model)
        for way in ("ours", "torch"):
            other = _sharded()
            another = _optimizer("AdamW8bit", other)
            if way == "ours":
                load_checkpoint(other, another, folder / "ours")
            else:
                other.load_state_dict(weights)
                target = {"optimizer": get_optimizer_state_dict(other, another)}
                dcp.load(target, checkpoint_id=folder / "torch")
                set_optimizer_state_dict(other, another, target["optimizer"])
            for mine, own in zip(other.parameters(), model.parameters(), strict=True):
                for key, value in before[own].items():
                    torch.testing.assert_close(another.state[mine][key], value, rtol=1e-6, atol=0, msg=f"{way} {key}")
            _train(other, another, range(3, 5), [dist.get_rank()])
            torch.testing.assert_close(_whole(other), expected, rtol=1e-5, atol=1e-6, msg=way)


@CHECKS.on(2)
def what_needs_whole_tensors_is_refused() -> None:
    model = _sharded()
    for name, match in (("LAMB8bit", "max_unorm=0.*norms of whole tensors"), ("AdEMAMix8bit", "another shape than")):
        with pytest.raises(NotImplementedError, match=match):
            fully_shard_optimizer(getattr(bitsandbytes.optim, name)(model.parameters()))


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_bitsandbytes(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)

"""Families of models, trained for three steps sharded over two ranks against unsharded, and brought in and out."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp import fully_shard, fully_shard_optimizer
from megatron.core.distributed.fsdp.huggingface import fully_shard_pretrained, load_pretrained, save_pretrained
from tests.support.rank_checks import RankChecks
from tests.support.shared_folder import shared_folder
from tests.third_party.families import FAMILIES, Family, without_dropout

for library in ("transformers", "timm", "diffusers"):
    pytest.importorskip(library)

CHECKS = RankChecks(__name__)
NUM_STEPS = 3


def _plain(family: Family) -> Any:
    torch.manual_seed(2)
    return without_dropout(family.build()).train()


def _batch(family: Family, rank: int, step: int) -> dict[str, Any]:
    return family.inputs(torch.Generator().manual_seed(10 * step + rank))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def _train_plainly(family: Family, model: nn.Module) -> list[float]:
    """Train on the mean over both ranks' losses; return this rank's."""
    optimizer, losses = _optimizer(model), []
    for step in range(NUM_STEPS):
        every = [family.loss(model, _batch(family, rank, step)) for rank in range(dist.get_world_size())]
        losses.append(every[dist.get_rank()].item())
        torch.stack(every).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _sharded(family: Family, plain: Any, folder: str) -> Any:
    """Return a sharded model with the plain one's weights; one of ``transformers`` comes from the meta device and from files."""
    if family.units is not None:
        model = _plain(family)
        for module in list(model.modules())[::-1]:
            if type(module).__name__ in family.units:
                fully_shard(module)
        return fully_shard(model)
    if dist.get_rank() == 0:
        plain.save_pretrained(f"{folder}/plain")
    dist.barrier()
    with torch.device("meta"):
        model = without_dropout(family.build()).train()
    fully_shard_pretrained(model, initialize=False)
    load_pretrained(model, f"{folder}/plain")
    return model


def _assert_family(family: Family) -> None:
    warnings.simplefilter("ignore")
    plain = _plain(family)
    with shared_folder() as folder:
        model = _sharded(family, plain, folder)
        _assert_same(model, plain, exact=True)
        expected, losses = _train_plainly(family, plain), []
        optimizer = fully_shard_optimizer(_optimizer(model))
        for step in range(NUM_STEPS):
            loss = family.loss(model, _batch(family, dist.get_rank(), step))
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        assert losses == pytest.approx(expected, rel=1e-4) and len(set(losses)) == NUM_STEPS
        _assert_same(model, plain, exact=False)
        if family.units is None:
            save_pretrained(model, f"{folder}/ours")
            again = type(plain).from_pretrained(f"{folder}/ours")
            _assert_same(model, again, exact=True)
        else:
            state = {name: _whole(tensor) for name, tensor in model.state_dict().items()}
            plain.load_state_dict(state)
            _assert_same(model, plain, exact=True)


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _assert_same(model: nn.Module, plain: nn.Module, *, exact: bool) -> None:
    theirs = dict(plain.named_parameters())
    ours = dict(model.named_parameters())
    assert list(ours) == list(theirs)
    for name, parameter in ours.items():
        whole = _whole(parameter.detach())
        if exact:
            assert torch.equal(whole, theirs[name]), name
        else:
            torch.testing.assert_close(whole, theirs[name].detach(), rtol=1e-3, atol=1e-5, msg=name)


def _register(name: str) -> None:
    check = functools.partial(_assert_family, FAMILIES[name])
    check.__name__ = name  # type: ignore[attr-defined]
    CHECKS.on(2)(check)


for _name in FAMILIES:
    _register(_name)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_families(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)

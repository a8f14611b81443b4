"""transformer-engine's own ``quantized_model_init`` under ``fully_shard``, on two GPUs; see the file without ``_gpu``."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.distributed.fsdp import fully_shard, fully_shard_optimizer
from megatron.core.distributed.fsdp.codec.frozen_weights import FrozenWeights
from tests.support.launch import run_ranks
from tests.support.models import full
from tests.support.te_gpu_training import HIDDEN, RECIPES, WIDTH, failures_by_recipe, loss_of, make_recipe, reset_fp8

NUM_STEPS = 3

pytestmark = [
    pytest.mark.gpu(2),
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None, reason="transformer-engine is not there"
    ),
]


def _recipe(name: str) -> Any:
    return make_recipe(name, amax_history_len=4)


class _Block(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        te: Any = importlib.import_module("transformer_engine.pytorch")
        kind: dict[str, Any] = {"bias": False, "params_dtype": torch.bfloat16, "device": device}
        self.up, self.down = te.LayerNormLinear(WIDTH, HIDDEN, **kind), te.Linear(HIDDEN, WIDTH, **kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return out


def _make(name: str, *, born: bool, device: str = "cuda", keeps: bool = False) -> Any:
    te: Any = importlib.import_module("transformer_engine.pytorch")
    torch.manual_seed(5)
    with te.quantized_model_init(enabled=born, recipe=_recipe(name), preserve_high_precision_init_val=keeps):
        return nn.Sequential(_Block(device), _Block(device))


def _weights(net: Any) -> list[Any]:
    return [weight for block in net for weight in (block.up.weight, block.down.weight)]


def _asking(name: str, codecs: list[Any], device: str) -> Any:
    net = _make(name, born=False, device=device)
    for weight, codec in zip(_weights(net), codecs, strict=True):
        weight.fsdp_codec = codec
    return net


def _shard(net: Any) -> Any:
    torch.manual_seed(5)  # what is materialised
    for block in net:
        fully_shard(block)
    return fully_shard(net)


def _train(net: Any, name: str) -> tuple[list[float], list[torch.Tensor]]:
    reset_fp8()
    optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=2.0**-4))
    losses = []
    for step in range(NUM_STEPS):
        loss = loss_of(net, _recipe(name), step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [full(parameter) for parameter in net.parameters()]


def _codecs(net: Any) -> list[Any]:
    found = {}
    for block in net:
        for group in block.parameter_groups:
            found.update({id(parameter): group.weights.codec for parameter in group.sharded})
    return [found[id(weight)] for weight in _weights(net)]


def _check_trained(name: str) -> None:
    """Layers whose weights are born in FP8 train as those of bf16 that ask for the same codec."""
    for device, keeps in (("cuda", True), ("meta", False)):
        net = _make(name, born=True, device=device, keeps=keeps)
        for parameter in net.parameters():
            parameter.note = "mine"
        _shard(net)
        assert all(parameter.note == "mine" for parameter in net.parameters()), (device, "attributes")
        assert all(codec.recipe == name for codec in _codecs(net))
        if name == "delayed":
            assert all((codec.margin, codec.amax_history_len) == (1, 4) for codec in _codecs(net))
        reference = _shard(_asking(name, _codecs(net), device))
        for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
            assert torch.equal(full(ours), full(theirs)), (device, keeps, "initial weights")
        losses, weights = _train(net, name)
        expected_losses, expected = _train(reference, name)
        assert losses == expected_losses, (device, keeps, losses, expected_losses)
        assert all(map(torch.equal, weights, expected)), (device, keeps)


def _check_frozen(name: str) -> None:
    """They keep bytes and scales, as they are multiplied without the engine."""
    net = _make(name, born=True, keeps=True)
    for weight in _weights(net):
        weight.requires_grad_(False)
    whole = loss_of(net, _recipe(name), 0).item()
    _shard(net)
    groups = [group for block in net for group in block.parameter_groups]
    assert sum(isinstance(group.weights, FrozenWeights) for group in groups) >= 2
    reset_fp8()
    for step in range(2):
        loss = loss_of(net, _recipe(name), 0)
        # The second forward of delayed scaling has other scales of activations.
        assert step or name == "delayed" or loss.item() == whole, (loss.item(), whole)
        loss.backward()
    assert not any(g.weights.main.has_values for g in groups if isinstance(g.weights, FrozenWeights))


def _check_all() -> dict[str, str]:
    return failures_by_recipe({"trained": _check_trained, "frozen": _check_frozen})


@functools.cache
def _failures() -> dict[str, str]:
    """Of all recipes, in one launch."""
    found: dict[str, str] = {}
    for failures in run_ranks(2, _check_all, backend="nccl"):
        found.update(failures)
    return found


@pytest.mark.parametrize("name", [f"{name}-{kind}" for name in RECIPES for kind in ("trained", "frozen")])
def test_quantized_layers_are_sharded_as_they_are(name: str) -> None:
    failure = _failures().get(name, "")
    assert not failure, failure

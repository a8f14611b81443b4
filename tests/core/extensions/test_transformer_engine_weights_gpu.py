"""FP8 weights under ZeRO-3 on two GPUs train as transformer-engine's own layers, which quantise whole bf16 weights."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer
from tests.support.launch import run_ranks
from tests.support.models import context_of, full
from tests.support.te_gpu_training import HIDDEN, RECIPES, WIDTH, failures_by_recipe, loss_of, make_recipe, reset_fp8

NUM_STEPS = 5
LEARNING_RATE = 2.0**-4

pytestmark = [
    pytest.mark.gpu(2),
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None, reason="transformer-engine is not there"
    ),
]


def _recipe(name: str) -> Any:
    return make_recipe(name, amax_history_len=3)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from megatron.core.extensions.transformer_engine_layers import te

        options: dict[str, Any] = {"bias": False, "params_dtype": torch.bfloat16, "device": "cuda"}
        self.up, self.down = te.Linear(WIDTH, HIDDEN, **options), te.Linear(HIDDEN, WIDTH, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return out


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _make_net() -> _Net:
    net, generator = _Net(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return net


def _train_whole(name: str, first_scales: list[torch.Tensor]) -> tuple[list[float], list[torch.Tensor]]:
    """Each rank holds the whole model; gradients are averaged in the wire's dtype."""
    reset_fp8()
    net, recipe = _make_net(), _recipe(name)
    main = [p.detach().float() for p in net.parameters()]
    losses = []
    for step in range(NUM_STEPS):
        with torch.no_grad():
            for parameter, own in zip(net.parameters(), main, strict=True):
                parameter.copy_(own)
        if step == 0 and name == "delayed":
            _start_scales(net, recipe, first_scales)
        loss = loss_of(net, recipe, step)
        loss.backward()
        losses.append(loss.item())
        for at, parameter in enumerate(net.parameters()):
            grad = parameter.grad
            assert grad is not None
            dist.all_reduce(grad)
            main[at] -= LEARNING_RATE * (grad.float() * 0.5)
            parameter.grad = None
    return losses, main


def _start_scales(net: nn.Module, recipe: Any, scales: list[torch.Tensor]) -> None:
    """Let transformer-engine's weights start with scales of their own; it starts with 1."""
    from megatron.core.extensions.transformer_engine_layers import te

    linears = [module for module in net.modules() if isinstance(module, te.Linear)]
    with te.autocast(enabled=True, recipe=recipe):
        for linear in linears:
            linear.init_fp8_metadata()
    for linear, scale in zip(linears, scales, strict=True):
        linear.fp8_meta["scaling_fwd"].scale[1].copy_(scale[0])


def _train_sharded(name: str) -> tuple[list[float], list[torch.Tensor], list[torch.Tensor]]:
    from megatron.core.extensions.transformer_engine_weights import te_weight_codec

    reset_fp8()
    net, recipe = _make_net(), _recipe(name)
    settings = {"amax_history_len": 3, "margin": 1} if name == "delayed" else {}
    for parameter in net.parameters():
        parameter.fsdp_codec = te_weight_codec(name, **settings)  # type: ignore[attr-defined]
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.float32)
    for module in (*net.layers, net):
        fully_shard(module, mixed_precision_policy=policy)
    optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=LEARNING_RATE, foreach=False))
    losses: list[float] = []
    first: list[torch.Tensor] = []
    for step in range(NUM_STEPS):
        loss = loss_of(net, recipe, step)
        if step == 0:
            for group in context_of(net).groups:
                weights: Any = group.weights
                scales = weights.codec.scales_by_weight(weights.scales.scale, group.layout)
                first += [scale.clone().flatten() for scale in scales]
        assert _has_only_bytes(net), "what backward multiplies is made in backward"
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    for group in context_of(net).groups:
        assert group.weights.model.local.dtype == group.weights.full.local.dtype == torch.uint8
    assert _has_only_bytes(net)
    assert context_of(net).planner.plan is not None
    return losses, [full(p) for p in net.parameters()], first


def _has_only_bytes(net: nn.Module) -> bool:
    """Whether no weight holds anything that layers derived from its bytes."""
    return all(
        getattr(weight, key) is value
        for group in context_of(net).groups
        for weight in group.unsharded
        for key, value in group.weights.codec.wrapper.derived.items()  # type: ignore[attr-defined]
    )


def _compare(name: str) -> None:
    losses, weights, first = _train_sharded(name)
    expected_losses, expected = _train_whole(name, first)
    again = _train_whole(name, first)[0]
    assert again == expected_losses, "two runs without the engine differ: the comparison needs another tolerance"
    assert losses == expected_losses, (losses, expected_losses)
    different = [at for at, pair in enumerate(zip(weights, expected, strict=True)) if not torch.equal(*pair)]
    assert not different, f"weights {different} differ"


def _compare_all() -> dict[str, str]:
    return failures_by_recipe({"trained": _compare})


@functools.cache
def _failures() -> dict[str, str]:
    """Of all recipes, in one launch."""
    found: dict[str, str] = {}
    for failures in run_ranks(2, _compare_all, backend="nccl"):
        found.update(failures)
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_sharded_bytes_train_as_whole_weights(name: str) -> None:
    failure = _failures().get(f"{name}-trained", "")
    assert not failure, failure

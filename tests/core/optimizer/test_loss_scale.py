"""Loss scales: their rules, and steps that undo them or are skipped, on plain and on sharded models."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp import FlatAdamW, MixedPrecisionPolicy, fully_shard, fully_shard_optimizer
from megatron.core.optimizer import (
    ConstantGradScaler,
    DynamicGradScaler,
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)
from tests.support.launch import run_ranks

CPU = torch.device("cpu")


def _rules(overflows: list[bool], window: int, hysteresis: int) -> list[float]:
    """Apply the rules of Megatron-Core's scaler to plain numbers; return the scale after each step."""
    scale, left, clean, scales = 256.0, hysteresis, 0, []
    for overflow in overflows:
        if overflow:
            clean, left = 0, left - 1
            if left <= 0:
                scale = max(scale / 2, 16.0)
        else:
            clean += 1
            if clean == window:
                clean, left, scale = 0, hysteresis, scale * 2
        scales.append(scale)
    return scales


def test_a_function_that_makes_state_is_refused_and_not_taken_for_a_scale() -> None:
    """Megatron-Core's third argument."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    with pytest.raises(NotImplementedError, match="init_state_fn must be None"):
        MegatronOptimizer(optimizer, OptimizerConfig(lr=0.1), lambda _: None)


@pytest.mark.parametrize(("window", "hysteresis"), [(1, 1), (3, 2), (4, 3)])
def test_the_scale_follows_the_rules_and_goes_on_from_its_state(window: int, hysteresis: int) -> None:
    overflows = [random.Random(window).random() < 0.4 for _ in range(60)]
    scaler = DynamicGradScaler(256.0, 16.0, 2.0, 0.5, window, hysteresis, device=CPU)
    address, scales = scaler.scale.data_ptr(), []
    for step, overflow in enumerate(overflows):
        scaler.update(torch.tensor([float(overflow)]) if step % 2 else overflow)
        scales.append(float(scaler.scale))
        if step == 30:
            state, scaler = scaler.state_dict(), DynamicGradScaler(1.0, 1.0, 2.0, 0.5, window, hysteresis, device=CPU)
            scaler.min_scale, address = 16.0, scaler.scale.data_ptr()
            scaler.load_state_dict(state)
    assert scales == _rules(overflows, window, hysteresis)
    assert scaler.scale.data_ptr() == address, "captured steps read it there"
    assert len(set(scales)) > 3


def test_settings_out_of_range_are_refused() -> None:
    for arguments in ((0.0, 1.0, 2.0, 0.5, 1, 1), (1.0, 2.0, 2.0, 0.5, 1, 1), (2.0, 1.0, 1.0, 0.5, 1, 1)):
        with pytest.raises(ValueError, match="must be"):
            DynamicGradScaler(*arguments, device=CPU)
    for setting in ({"loss_scale": 0.0}, {"loss_scale_window": 1.5}, {"hysteresis": 0}, {"initial_loss_scale": 0.5}):
        with pytest.raises(ValueError, match="must be"):
            OptimizerConfig(fp16=True, **setting)


# ---- steps ----------------------------------------------------------------------------------------------------------


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.GELU()), nn.Linear(8, 5), nn.Linear(5, 1))


def _train(
    optimizer: MegatronOptimizer, model: nn.Module, *, overflow_at: int | None = None, steps: int = 5
) -> list[dict[str, Any]]:
    """Train; at one step put an infinity into the gradients of the last rank alone. Return what each step came to."""
    told = []
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(steps):
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.scale_loss(model(inputs).float().square().mean()).backward()
        if step == overflow_at and rank == 1:
            gradients: list[Any] = [p.grad for p in model.parameters() if p.grad is not None]
            next(one._local_tensor for one in gradients if one._local_tensor.numel()).view(-1)[0] = float("inf")
        result = optimizer.step()
        optimizer.zero_grad()
        state = {
            index: {key: _whole(value) for key, value in entries.items()}
            for index, entries in optimizer.state_dict()["state"].items()
        }
        told.append(
            {
                "successful": result.update_successful,
                "norm": None if result.grad_norm is None else float(result.grad_norm),
                "scale": float(optimizer.get_loss_scale()),
                "weights": [_whole(p) for p in model.parameters()],
                "state": state,
            }
        )
    return told


def _whole(tensor: torch.Tensor) -> list[float]:
    full = tensor.detach()
    full = full.full_tensor() if isinstance(full, DTensor) else full
    return full.flatten().tolist()


def _sharded(kind: str, policy: MixedPrecisionPolicy | None = None) -> nn.Sequential:
    model = _model()
    if kind != "plain":
        fully_shard(model[0], mixed_precision_policy=policy)
        fully_shard(model, mixed_precision_policy=policy)
    return model


def _optimizer(model: nn.Module, name: str, **settings: Any) -> MegatronOptimizer:
    config = OptimizerConfig(lr=0.05, clip_grad=0.3, optimizer=name, **settings)
    return get_megatron_optimizer(config, [model])


def _with_torch_scaler(scaler_of: str, optimizer_of: str) -> list[list[float]]:
    """Train in fp16 with torch's scaler; an infinity in the last rank's gradients at step 2. Return [scale, norm, weights]."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    warnings.simplefilter("ignore")  # torch's scalers hold numbers in tensors of one dimension
    model = _sharded("sharded", MixedPrecisionPolicy(param_dtype=torch.float16))
    if optimizer_of == "flat":
        optimizer: torch.optim.Optimizer = FlatAdamW(model.parameters(), lr=0.05)
    else:
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    scaler = (ShardedGradScaler if scaler_of == "sharded" else torch.amp.GradScaler)(
        "cpu", init_scale=1024.0, growth_interval=2
    )
    told = []
    for step in range(5):
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        scaler.scale(model(inputs).float().square().mean()).backward()
        if step == 2 and dist.get_rank() == 1:
            next(p.grad for p in model.parameters() if p.grad._local_tensor.numel())._local_tensor.view(-1)[0] = float(
                "inf"
            )
        scaler.unscale_(optimizer)
        norm = _whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        told.append([scaler.get_scale(), *norm, *(x for p in model.parameters() for x in _whole(p))])
    return told


_CASES = {
    "flat, unscaled": ("flat", "adam", {}, None),
    "flat, constant": ("flat", "adam", {"loss_scale": 4096.0}, None),
    "flat, overflow": ("flat", "adam", {"fp16": True, "initial_loss_scale": 4096.0, "hysteresis": 1}, 2),
    "flat, constant, overflow": ("flat", "adam", {"loss_scale": 4096.0}, 2),
    "torch, unscaled": ("torch", "sgd", {}, None),
    "torch, constant": ("torch", "sgd", {"loss_scale": 4096.0}, None),
    "torch, overflow": ("torch", "sgd", {"fp16": True, "initial_loss_scale": 4096.0, "hysteresis": 1}, 2),
}


def _on_ranks() -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name, (kind, optimizer, settings, overflow_at) in _CASES.items():
        model = _sharded(kind)
        told[name] = _train(_optimizer(model, optimizer, **settings), model, overflow_at=overflow_at)
    for scaler in ("torch", "sharded"):
        for kind in ("flat", "torch"):
            told[f"torch's scaler: {scaler}, {kind}"] = _with_torch_scaler(scaler, kind)
    return told


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(2, _on_ranks)


@pytest.mark.parametrize("kind", ["flat", "torch"])
def test_a_constant_scale_changes_no_bit(ranks: list[dict[str, Any]], kind: str) -> None:
    """It is undone before the norm, clipping and the update, and a power of two rounds nothing."""
    scaled, plain = ranks[0][f"{kind}, constant"], ranks[0][f"{kind}, unscaled"]
    assert [step["scale"] for step in scaled] == [4096.0] * 5
    for got, wanted in zip(scaled, plain, strict=True):
        assert {**got, "scale": 1.0} == wanted
    assert plain[0]["norm"] > 0.3, "gradients are clipped"


@pytest.mark.parametrize("name", ["flat, overflow", "torch, overflow", "flat, constant, overflow"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: list[dict[str, Any]], name: str) -> None:
    steps = ranks[0][name]
    assert ranks[1][name] == steps
    assert [step["successful"] for step in steps] == [True, True, False, True, True]
    assert steps[2]["norm"] is None
    before, after = steps[1], steps[2]
    assert after["weights"] == before["weights"] and after["state"] == before["state"], "step counts too"
    assert steps[3]["weights"] != after["weights"]
    is_constant = "constant" in name
    assert [step["scale"] for step in steps] == [4096.0] * 2 + [4096.0 if is_constant else 2048.0] * 3


def test_torch_scalers_agree_over_ranks_and_optimizers(ranks: list[dict[str, Any]]) -> None:
    """As with FSDP2: what one rank finds, all skip."""
    names = [name for name in ranks[0] if name.startswith("torch's scaler")]
    wanted = ranks[0][names[0]]
    assert [step[0] for step in wanted] == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]
    assert wanted[2][2:] == wanted[1][2:] and wanted[3][2:] != wanted[2][2:]
    for name in names:
        assert ranks[0][name] == ranks[1][name]
        torch.testing.assert_close(torch.tensor(ranks[0][name]), torch.tensor(wanted), rtol=1e-6, atol=1e-7)


def test_gradients_are_prepared_and_applied_in_parts() -> None:
    whole, parts = _model(), _model()
    steps = [_optimizer(model, "adam", loss_scale=8.0) for model in (whole, parts)]
    for _ in range(2):
        for model, optimizer in zip((whole, parts), steps, strict=True):
            optimizer.scale_loss(0.01 * model(torch.ones(2, 6)).sum()).backward()
        assert steps[0].step().update_successful
        assert steps[1].prepare_grads() is False
        assert steps[1].step_with_ready_grads() is True
        for optimizer in steps:
            optimizer.zero_grad()
    for got, wanted in zip(parts.parameters(), whole.parameters(), strict=True):
        assert torch.equal(got, wanted)
    parts(torch.full((1, 6), float("nan"))).sum().backward()
    assert steps[1].prepare_grads() is True


def test_preparing_gradients_updates_the_scale() -> None:
    model = _model()
    optimizer = _optimizer(model, "adam", fp16=True, initial_loss_scale=16.0, hysteresis=1, loss_scale_window=1)
    for factor, wanted in ((1.0, 32.0), (float("nan"), 16.0), (1.0, 32.0)):
        optimizer.scale_loss(model(torch.ones(2, 6)).sum() * factor).backward()
        assert optimizer.prepare_grads() is (factor != 1.0)
        assert float(optimizer.get_loss_scale()) == wanted
        optimizer.zero_grad()


def test_the_scale_is_in_the_state() -> None:
    optimizer = _optimizer(_model(), "adam", fp16=True, hysteresis=1)
    scaler = optimizer.grad_scaler
    assert isinstance(scaler, DynamicGradScaler) and float(scaler.scale) == 2.0**32
    scaler.update(True)
    other = _optimizer(_model(), "adam", fp16=True)
    other.load_state_dict(optimizer.state_dict())
    assert other.grad_scaler is not None and float(other.grad_scaler.scale) == 2.0**31
    assert isinstance(_optimizer(_model(), "adam", loss_scale=2.0).grad_scaler, ConstantGradScaler)
    assert _optimizer(_model(), "adam").grad_scaler is None

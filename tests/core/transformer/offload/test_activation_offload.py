"""What modules save rests in the host's memory: the same gradients, and as little on the device as was asked for."""

from __future__ import annotations

import gc
import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from megatron.core.transformer.offload.activation_offload import ActivationOffload, _is_dense, _Saved


def _layers(number: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(number)]
    return nn.Sequential(*blocks)


def _gradients(model: nn.Module, *, batches: int = 1, at_once: bool = False) -> list[torch.Tensor]:
    inputs = torch.randn(batches, 3, 8, generator=torch.Generator().manual_seed(1))
    if at_once:  # forwards of all batches, then backwards, as a pipeline's first stage does
        outputs = [model(batch).square().sum() for batch in inputs]
        for output in outputs:
            output.backward()
    else:
        for batch in inputs:
            model(batch).square().sum().backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def _offloaded(model: nn.Sequential, number: int, **settings: int) -> ActivationOffload:
    offload = ActivationOffload(**settings)
    for layer in list(model)[:number]:
        offload.attach(layer)
    return offload


@pytest.mark.parametrize("number", [1, 3, 4])
@pytest.mark.parametrize("max_regions", [0, 1, 2])
@pytest.mark.parametrize(("batches", "at_once"), [(1, False), (3, False), (3, True)])
def test_gradients_are_the_same_to_the_last_bit(number: int, max_regions: int, batches: int, at_once: bool) -> None:
    plain, model = _layers(), _layers()
    offload = _offloaded(model, number, max_regions=max_regions)
    for _ in range(2):
        wanted = _gradients(plain, batches=batches, at_once=at_once)
        for got, one in zip(_gradients(model, batches=batches, at_once=at_once), wanted, strict=True):
            assert torch.equal(got, one)
    assert offload.pool.nbytes > 0


def test_buffers_of_the_host_are_used_again_and_bounded() -> None:
    model = _layers()
    offload = _offloaded(model, 3)
    _gradients(model)
    first = offload.pool.nbytes
    for _ in range(3):
        _gradients(model, batches=2)
    assert offload.pool.nbytes == first
    # Of a layer: the norm's input and its mean and deviation, inputs of both linears and of GELU.
    floats = 3 * (3 * 8 + 2 * 3 + 3 * 8 + 2 * 3 * 16)
    assert first == 4 * floats


class _Watched(torch.autograd.Function):
    """Notes which tensors that forward saved are on the device, without keeping them."""

    alive: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        kept = x * 2
        ctx.save_for_backward(kept)
        _Watched.alive.append(weakref.ref(kept.untyped_storage()))
        return x + 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (kept,) = ctx.saved_tensors
        return grad * kept


class _Keeps(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Watched.apply(x)
        return result


def test_the_device_has_the_latest_regions_alone() -> None:
    model = nn.Sequential(*(_Keeps() for _ in range(5)))
    _offloaded(model, 5, max_regions=2)
    _Watched.alive = []
    x = torch.ones(4, requires_grad=True)
    loss = model(x).sum()
    alive = [storage() is not None for storage in _Watched.alive]
    assert alive == [False, False, False, True, True]
    loss.backward()
    plain = torch.ones(4, requires_grad=True)
    nn.Sequential(*(_Keeps() for _ in range(5)))(plain).sum().backward()
    assert x.grad is not None and plain.grad is not None and torch.equal(x.grad, plain.grad)


def test_weights_small_tensors_and_evaluations_stay_where_they_are() -> None:
    model = _layers(2)
    offload = _offloaded(model, 2, min_numel=3 * 16)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: list[Any] = []
    pack = _Saved.__init__

    def noted(self: _Saved, tensor: torch.Tensor, *rest: Any) -> None:
        kept.append((tensor.numel(), tensor.untyped_storage().data_ptr() in weights))
        pack(self, tensor, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Saved, "__init__", noted)
        with torch.no_grad():
            model(torch.ones(3, 8))
        assert kept == []
        model(torch.ones(3, 8)).sum().backward()
    assert kept == [(48, False)] * 4
    assert offload.pool.nbytes == 4 * 48 * 4


def test_a_graph_may_be_kept_given_up_or_differentiated_again() -> None:
    model, plain = _layers(3), _layers(3)
    offload = _offloaded(model, 3)
    for one in (model, plain):
        loss = one(torch.ones(3, 8)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None and torch.equal(mine.grad, other.grad)
    used = offload.pool.nbytes
    gc.disable()
    try:
        for _ in range(3):
            model(torch.ones(3, 8))  # its graph is given up
        model(torch.ones(3, 8)).sum().backward()
    finally:
        gc.enable()
    assert offload.pool.nbytes <= 2 * used


def test_an_error_in_forward_closes_the_region() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(7, 8))
    offload = _offloaded(model, 2)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(3, 8))
    assert offload._open == []
    saved = (torch.ones(2, requires_grad=True) * 2).square()
    assert not isinstance(saved.grad_fn._raw_saved_self, _Saved)


def test_tensors_with_gaps_or_overlaps_stay() -> None:
    x = torch.empty(4, 6)
    assert _is_dense(x) and _is_dense(x.t()) and _is_dense(torch.empty(2, 3, 4).permute(2, 0, 1))
    assert not _is_dense(x[:, :3]) and not _is_dense(torch.empty(4, 1).expand(4, 6))

"""The norm of a sharded gradient is the norm of the whole gradient, under any sharding."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm, count_zeros, get_grad_norm, get_params_norm
from tests.support.launch import run_ranks

_SHAPES = [(7, 3), (1, 5), (4,), (9,), (6, 2)]


def _full_gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    gradients = [torch.randn(shape, generator=generator) for shape in _SHAPES]
    gradients[0][2] = 0.0
    return gradients


def _with_gradients(gradients: list[torch.Tensor]) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(gradient.clone()) for gradient in gradients]
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient.clone()
    return [*params, torch.nn.Parameter(torch.ones(3))]


def _measure(params: list[torch.nn.Parameter], max_norm: float) -> tuple[float, float, float, float, list[list]]:
    norm = get_grad_norm(params)
    zeros = count_zeros(params)
    clip_grad_by_total_norm(params, max_norm, norm)
    clipped = [param.grad for param in params if param.grad is not None]
    full = [(g.full_tensor() if isinstance(g, DTensor) else g).tolist() for g in clipped]
    return norm.item(), zeros.item(), get_grad_norm(params).item(), get_params_norm(params).item(), full


def _expected(max_norm: float) -> tuple[float, float, list[torch.Tensor]]:
    gradients = _full_gradients()
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
    return norm, 3.0, [gradient * min(1.0, max_norm / (norm + 1e-6)) for gradient in gradients]


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_plain_tensors(max_norm: float) -> None:
    norm, zeros, after, params_norm, clipped = _measure(_with_gradients(_full_gradients()), max_norm)
    expected_norm, expected_zeros, expected = _expected(max_norm)
    assert norm == pytest.approx(expected_norm, rel=1e-6)
    assert zeros == expected_zeros
    assert after == pytest.approx(min(max_norm, expected_norm), rel=1e-5)
    assert params_norm == pytest.approx((expected_norm**2 + 3) ** 0.5, rel=1e-6)
    for got, wanted in zip(clipped, expected, strict=True):
        torch.testing.assert_close(torch.tensor(got), wanted, rtol=1e-6, atol=0)


def _measure_sharded(max_norm: float) -> tuple[float, float, float, float, list[list]]:
    flat = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    kinds: list[tuple[DeviceMesh, list[Placement]]] = [
        (flat, [Shard(0)]),  # uneven; (1, 5) leaves three ranks without rows
        (flat, [Shard(0)]),
        (flat, [Replicate()]),
        (square, [Replicate(), Shard(0)]),
        (square, [Shard(0), Shard(0)]),
    ]
    params = _with_gradients(_full_gradients())
    sharded = []
    for param, (mesh, placements) in zip(params[:-1], kinds, strict=True):
        assert param.grad is not None
        new = torch.nn.Parameter(distribute_tensor(param.detach(), mesh, placements))
        new.grad = distribute_tensor(param.grad, mesh, placements)
        sharded.append(new)
    return _measure([*sharded, params[-1]], max_norm)


def test_each_element_counts_once_over_every_kind_of_sharding() -> None:
    expected_norm, expected_zeros, expected = _expected(0.5)
    for norm, zeros, after, params_norm, clipped in run_ranks(4, _measure_sharded, 0.5):
        assert norm == pytest.approx(expected_norm, rel=1e-6)
        assert zeros == expected_zeros
        assert after == pytest.approx(0.5, rel=1e-5)
        assert params_norm == pytest.approx((expected_norm**2 + 3) ** 0.5, rel=1e-6)
        for got, wanted in zip(clipped, expected, strict=True):
            torch.testing.assert_close(torch.tensor(got), wanted, rtol=1e-6, atol=0)


def _norm_with_one_bad_rank() -> tuple[bool, bool]:
    import torch.distributed as dist

    mesh = init_device_mesh("cpu", (2,))
    local = torch.full((2, 2), float("nan") if dist.get_rank() == 1 else 1.0)
    param = torch.nn.Parameter(DTensor.from_local(torch.zeros(2, 2), mesh, [Shard(0)]))
    param.grad = DTensor.from_local(local, mesh, [Shard(0)])
    norm = get_grad_norm([param])
    clip_grad_by_total_norm([param], 1.0, norm)
    return bool(norm.isfinite()), bool(param.grad._local_tensor.isnan().all())


def test_a_non_finite_gradient_on_one_rank_is_seen_by_all() -> None:
    assert run_ranks(2, _norm_with_one_bad_rank) == [(False, True), (False, True)]


def _norm_of_partial_gradient() -> None:
    mesh = init_device_mesh("cpu", (2,))
    param = torch.nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate()]))
    param.grad = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(RuntimeError, match="must be reduced before their norm"):
        get_grad_norm([param])


def test_an_unreduced_gradient_is_refused() -> None:
    run_ranks(2, _norm_of_partial_gradient)


def test_gradients_of_several_dtypes_have_one_norm_in_fp32() -> None:
    params = [torch.nn.Parameter(torch.zeros(300, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]
    for param in params:
        param.grad = torch.ones_like(param)
    norm = get_grad_norm(params)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(600**0.5, rel=1e-6)
    clip_grad_by_total_norm(params, 1.0, norm)
    assert params[0].grad is not None and params[0].grad.dtype == torch.bfloat16
    assert get_grad_norm(params).item() == pytest.approx(1.0, rel=1e-2)  # bf16 rounds the clipped values


def test_no_gradient_at_all_has_norm_zero() -> None:
    assert get_grad_norm([torch.nn.Parameter(torch.ones(2))]).item() == 0.0

"""Operations on DTensors and on the whole tensors that these stand for; the results must be equal, or the first refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

Full = Callable[[int, int], torch.Tensor]
Split = Callable[[int, torch.Tensor], Any]

# Element by element, which stays on its rank: (a, b) of one shape.
ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "mul_": lambda a, b: a.mul_(b),
    "mul_ scalar": lambda a, b: a.mul_(0.5),
    "add_ alpha": lambda a, b: a.add_(b, alpha=0.3),
    "lerp_": lambda a, b: a.lerp_(b, 0.1),
    "addcdiv_": lambda a, b: a.addcdiv_(b, b.abs() + 1, value=-0.1),
    "addcmul": lambda a, b: torch.addcmul(a, b, b, value=0.2),
    "zeros_like": lambda a, b: torch.zeros_like(a),
    "ones_like": lambda a, b: torch.ones_like(a),
    "full_like": lambda a, b: torch.full_like(a, 3.0),
    "new_zeros": lambda a, b: a.new_zeros(a.shape),
    "new_empty": lambda a, b: a.new_empty(a.shape).fill_(2.0),
    "clone": lambda a, b: a.clone(),
    "deepcopy": lambda a, b: copy.deepcopy(a),
    "detach": lambda a, b: a.detach(),
    "view_as": lambda a, b: a.view_as(a),
    "view rows": lambda a, b: a.view(*a.shape, 1).mul(2).view(a.shape),
    "to": lambda a, b: a.to(torch.float64),
    "copy_": lambda a, b: a.copy_(b),
    "zero_": lambda a, b: a.zero_(),
    "fill_": lambda a, b: a.fill_(4.0),
    "where": lambda a, b: torch.where(a > b, a, b),
    "clamp": lambda a, b: a.clamp(min=0.1),
    "sqrt": lambda a, b: b.abs().sqrt(),
    "sign": lambda a, b: (a - b).sign(),
    "out": lambda a, b: torch.add(a, b, out=torch.empty_like(a)),
}
FOREACH: dict[str, Callable[..., Any]] = {
    "mul_": lambda a, b: torch._foreach_mul_(a, 0.5),
    "mul_ list": lambda a, b: torch._foreach_mul_(a, b),
    "mul_ tensor": lambda a, b: torch._foreach_mul_(a, torch.tensor(0.3)),
    "add_": lambda a, b: torch._foreach_add_(a, b, alpha=0.3),
    "lerp_": lambda a, b: torch._foreach_lerp_(a, b, 0.1),
    "addcdiv_": lambda a, b: torch._foreach_addcdiv_(a, b, torch._foreach_add(torch._foreach_abs(b), 1.0), -0.1),
    "copy_": lambda a, b: torch._foreach_copy_(a, b),
    "zero_": lambda a, b: torch._foreach_zero_(a),
    "sub": lambda a, b: torch._foreach_sub(a, b),
    "sqrt": lambda a, b: torch._foreach_sqrt(torch._foreach_abs(a)),
}

REDUCED: dict[str, Callable[..., torch.Tensor]] = {
    "norm": lambda a: a.norm(),
    "vector_norm 1": lambda a: torch.linalg.vector_norm(a, 1),
    "vector_norm 3": lambda a: torch.linalg.vector_norm(a, 3),
    "vector_norm inf": lambda a: torch.linalg.vector_norm(a, float("inf")),
    "vector_norm -inf": lambda a: torch.linalg.vector_norm(a, float("-inf")),
    "vector_norm 0": lambda a: torch.linalg.vector_norm(a, 0),
    "vector_norm of rows": lambda a: torch.linalg.vector_norm(a, 2, dim=-1),
    "sum": lambda a: a.sum(),
    "sum of columns": lambda a: a.sum(dim=0),
    "sum of rows": lambda a: a.sum(dim=-1),
    "mean": lambda a: a.mean(),
    "mean of columns": lambda a: a.mean(dim=0),
    "max": lambda a: a.max(),
    "amin": lambda a: a.amin(dim=0),
    "all": lambda a: a.isfinite().all(),
    "cumsum": lambda a: a.cumsum(dim=0),
    "stack": lambda a: torch.stack([a, a]),
    "cat": lambda a: torch.cat([a, a * 2]),
    "foreach norm": lambda a: torch.stack(torch._foreach_norm([a, a * 2])),
    "foreach norm inf": lambda a: torch.stack(torch._foreach_norm([a], float("inf"))),
    "foreach max": lambda a: torch.stack(torch._foreach_max([a])),
    "matmul": lambda a: torch.ones(3, a.shape[0]) @ a if not isinstance(a, DTensor) else _ones(a) @ a,
    "broadcast": lambda a: a + (a.sum(dim=0) if a.ndim == 1 else a.sum(dim=-1, keepdim=True)),
    "broadcast other dims": lambda a: a.unflatten(0, (1, -1)) if not isinstance(a, DTensor) else _whole(a)[None],
    "outer": lambda a: (a if a.ndim == 1 else a.sum(dim=-1)) * _square(a),
    "equal": lambda a: torch.tensor(torch.equal(a, a) and not torch.equal(a, a * 2)),
}


def _ones(tensor: DTensor) -> DTensor:
    return DTensor.from_local(torch.ones(3, tensor.shape[0]), tensor.device_mesh, [Replicate()], run_check=False)


def _whole(tensor: DTensor) -> DTensor:
    return tensor.redistribute(placements=[Replicate()])


def _square(tensor: torch.Tensor) -> torch.Tensor:
    """[rows, rows], against which a vector of the rows broadcasts along the other dim than it is split on."""
    square = torch.arange(float(tensor.shape[0] ** 2)).view(tensor.shape[0], -1)
    if isinstance(tensor, DTensor):
        return DTensor.from_local(square, tensor.device_mesh, [Replicate()], run_check=False)
    return square


REFUSED: dict[str, Callable[[DTensor], Any]] = {
    "select": lambda a: a[0],
    "slice": lambda a: a[1:3],
    "transpose": lambda a: a.t(),
    "unsqueeze": lambda a: a.unsqueeze(0),
    "argmax": lambda a: a.argmax(),
    "cumsum_": lambda a: a.cumsum_(dim=0),
    "index_fill_": lambda a: a.index_fill_(0, torch.tensor(0), 1.0),
}

OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (optimizer, {**settings, **kind})
    for optimizer, settings in [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        (torch.optim.Adam, {"lr": 0.1}),
        (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1, "amsgrad": True}),
    ]
    for kind in ({"foreach": False}, {"foreach": True}, {"fused": True})
]


def assert_optimizers_step_as_on_the_whole(num_tensors: int, full: Full, split: Split) -> None:
    """Three steps of each optimizer lead DTensors where they lead the whole tensors; states are placed as parameters are.

    Args:
        full: (index, seed) -> a whole tensor.
        split: (index, whole tensor) -> the DTensor that stands for it.

    Ranks: all.
    """
    for optimizer_class, options in OPTIMIZERS:
        parts: list[Any] = [torch.nn.Parameter(split(index, full(index, 0))) for index in range(num_tensors)]
        whole = [torch.nn.Parameter(full(index, 0)) for index in range(num_tensors)]
        optimizers = [optimizer_class(parameters, **options) for parameters in (parts, whole)]
        for step in range(1, 4):
            for index, parameter in enumerate(parts):
                parameter.grad = split(index, full(index, step))
                whole[index].grad = full(index, step)
            for optimizer in optimizers:
                optimizer.step()
        for parameter, wanted in zip(parts, whole, strict=True):
            # Fused kernels take vectors of elements, whose ends fall elsewhere on a part of the rows.
            tolerance = 1e-6 if options.get("fused") else 0.0
            torch.testing.assert_close(parameter.full_tensor(), wanted.detach(), rtol=tolerance, atol=tolerance)
            for name, state in optimizers[0].state[parameter].items():
                if isinstance(state, DTensor):
                    assert state.placements == parameter.placements, f"{name} is placed by {state.placements}"

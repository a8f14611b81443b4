"""Stand-ins for ``FusedAdam`` of apex and of transformer-engine, in plain PyTorch on any device.

They have the constructors, attributes and methods of the real classes, and keep state as these do. What stands for a kernel
reads memory as a kernel does: a DTensor has none, and one of apex's launches is lost if its last tensor is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor

Lists = Sequence[Sequence[torch.Tensor]]


def _launch(lists: Lists, update: Callable[..., None]) -> None:
    """Call ``update`` as apex's ``multi_tensor_apply`` launches blocks: when it comes to the last block of the last tensor."""
    if not lists[0]:
        raise RuntimeError("tensor_lists[0].size() is not > 0")
    waiting: list[tuple[torch.Tensor, ...]] = []
    for index, row in enumerate(zip(*lists, strict=True)):
        for tensor in row:
            if type(tensor) is DTensor or (tensor.numel() > 0 and tensor.data_ptr() == 0):
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            if tensor.numel() != row[0].numel():
                raise RuntimeError("Size mismatch")
            if not tensor.is_contiguous():
                raise RuntimeError("A tensor was not contiguous.")
        waiting += [row] if row[0].numel() else []
        if index == len(lists[0]) - 1 and row[0].numel():
            for each in waiting:
                update(*(tensor.detach() for tensor in each))


def _adam(
    lists: Lists, lr: float, betas: tuple[float, float], eps: float, step: int, mode: int, corrects: int, decay: float
) -> None:
    corrections = [1 - beta**step if corrects else 1.0 for beta in betas]

    def update(grad: Any, param: Any, exp_avg: Any, exp_avg_sq: Any, master: Any = None) -> None:
        g, p, m, v = grad.float(), (param if master is None else master).float(), exp_avg.float(), exp_avg_sq.float()
        if mode == 0:
            g = g + decay * p
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        change = (m / corrections[0]) / ((v / corrections[1]).sqrt() + eps)
        p = p - lr * (change + decay * p if mode == 1 else change)
        for target, value in ((param, p), (exp_avg, m), (exp_avg_sq, v), (master, p)):
            if target is not None:
                target.data.copy_(value)  # unknown to autograd, as what a kernel writes

    _launch(lists, update)


def multi_tensor_adam(
    chunk: int, noop: Any, lists: Lists, lr: float, beta1: float, beta2: float, eps: float, step: int, *rest: Any
) -> None:
    if not isinstance(lr, float) or not isinstance(step, int):
        raise TypeError("multi_tensor_adam(): incompatible function arguments")
    _adam(lists, lr, (beta1, beta2), eps, step, *rest)


def multi_tensor_adam_capturable(
    chunk: int, noop: Any, lists: Lists, lr: Any, beta1: float, beta2: float, eps: float, step: Any, *rest: Any
) -> None:
    if not isinstance(lr, torch.Tensor) or not isinstance(step, torch.Tensor):
        raise TypeError("multi_tensor_adam_capturable(): incompatible function arguments")
    *rest, inverse_scale = rest  # type: ignore[assignment]
    assert inverse_scale.item() == 1.0
    _adam(lists, lr.item(), (beta1, beta2), eps, int(step.item()), *rest)


def multi_tensor_adam_param_remainder(chunk: int, noop: Any, lists: Lists, *rest: Any) -> None:
    """Main weights of which the parameter is the upper half (rounded towards zero) and an int16 the lower one."""
    grads, params, exp_avgs, exp_avg_sqs, remainders = lists
    mains = [
        ((p.detach().view(torch.int16).int() << 16) | (r.int() & 0xFFFF)).view(torch.float32)
        for p, r in zip(params, remainders, strict=True)
    ]
    multi_tensor_adam(chunk, noop, [grads, mains, exp_avgs, exp_avg_sqs], *rest)
    for main, param, remainder in zip(mains, params, remainders, strict=True):
        param.detach().view(torch.int16).data.copy_(main.view(torch.int32) >> 16)
        remainder.data.copy_(main.view(torch.int32) & 0xFFFF)


class _Adam(torch.optim.Optimizer):
    """What both classes have."""

    def _set_up(self, params: Any, lr: Any, capturable: bool, adam_w_mode: bool, **defaults: Any) -> None:
        lr = torch.tensor(lr, dtype=torch.float32) if capturable else lr
        torch.optim.Optimizer.__init__(self, params, {"lr": lr, **defaults})
        self.adam_w_mode, self.capturable = int(adam_w_mode), capturable
        self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int)
        self.multi_tensor_adam = multi_tensor_adam
        self.multi_tensor_adam_capturable = multi_tensor_adam_capturable

    def _count(self, group: dict[str, Any]) -> None:
        first = torch.ones(1, dtype=torch.int) if self.capturable else 1
        group["step"] = group["step"] + 1 if "step" in group else first

    def _call(self, kernel: Any, group: dict[str, Any], lists: list[list[torch.Tensor]], applier: Any) -> None:
        scale = (torch.ones(1),) if self.capturable else ()
        rates = (group["lr"], *group["betas"], group["eps"], group["step"], self.adam_w_mode)
        applier(
            kernel,
            self._dummy_overflow_buf,
            lists,
            *rates,
            int(group["bias_correction"]),
            group["weight_decay"],
            *scale,
        )


class ApexFusedAdam(_Adam):
    """``apex.optimizers.FusedAdam``."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        assert not amsgrad and (capturable or not master_weights)
        rates = {"bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self._set_up(params, lr, capturable, adam_w_mode, **rates)
        self.set_grad_none, self.master_weights = set_grad_none, master_weights
        self.param_groups_master = [{"params": [None for _ in group["params"]]} for group in self.param_groups]

    def zero_grad(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:  # type: ignore[override]
        for group, masters in zip(self.param_groups, self.param_groups_master, strict=False):
            self._count(group)
            lists: list[list[torch.Tensor]] = [[], [], [], []]
            for param, _ in zip(group["params"], masters["params"], strict=False):
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(param.data).float() for _ in range(2))
                row = (param.grad.data, param.data, state["exp_avg"], state["exp_avg_sq"])
                for tensors, tensor in zip(lists, row, strict=True):
                    tensors.append(tensor)
            if lists[0]:
                kernel = self.multi_tensor_adam_capturable if self.capturable else self.multi_tensor_adam
                self._call(kernel, group, lists, lambda op, *args: op(2**16, *args))


def _apply_to_local(op: Any, noop: Any, lists: list[list[torch.Tensor]], *args: Any) -> None:
    """As transformer-engine's ``multi_tensor_applier``, which knows DTensors and empty tensors."""
    lists = [[t._local_tensor if isinstance(t, DTensor) else t for t in tensors] for tensors in lists]
    kept = [tensor.numel() > 0 for tensor in lists[0]]
    if any(kept):
        op(2**16, noop, [[t for t, keep in zip(tensors, kept, strict=True) if keep] for tensors in lists], *args)


class TransformerEngineFusedAdam(_Adam):
    """``transformer_engine.pytorch.optimizers.FusedAdam``; torch's float8 with a scale in place of its Float8Tensor."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        assert not amsgrad and set_grad_none is None
        rates = {"bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self._set_up(params, lr, capturable, adam_w_mode, **rates)
        self.multi_tensor_adam_param_remainder = multi_tensor_adam_param_remainder
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights and master_weight_dtype == torch.float32
        names = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, "master_param": master_weight_dtype}
        self.name_to_dtype_map = names
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        torch.optim.Optimizer.zero_grad(self, set_to_none=set_to_none is not False)

    def _is_remainder(self, param: torch.Tensor, name: str) -> bool:
        return self.store_param_remainders and name == "master_param" and param.dtype == torch.bfloat16

    def _apply_scale(self, name: str, unscaled: torch.Tensor, scaled: torch.Tensor, scale: torch.Tensor) -> None:
        assert unscaled.dtype == torch.float32
        if scaled.dtype == torch.bfloat16:
            scaled.copy_(unscaled)
            return
        low, high = torch.aminmax(unscaled)  # an error where there is nothing
        largest = 448.0 if scaled.dtype == torch.float8_e4m3fn else torch.finfo(scaled.dtype).max / 2
        scale.copy_(torch.maximum(-low, high) / largest)
        scaled.copy_(unscaled * torch.where(scale > 0, 1 / scale, 0.0))

    def get_unscaled_state(self, param: torch.Tensor, name: str, skip_unscale: bool = False) -> torch.Tensor:
        state = self.state[param][name]
        local: torch.Tensor = state._local_tensor if isinstance(state, DTensor) else state
        dtype = self.name_to_dtype_map[name]
        assert local.dtype == (torch.int16 if self._is_remainder(param, name) else _stored(dtype))
        if dtype in (torch.float32, torch.bfloat16):
            return local if dtype == torch.float32 else local.float()
        return local.float() * self._scales[param][name]

    def set_scaled_state(self, param: torch.Tensor, name: str, unscaled: torch.Tensor) -> None:
        assert unscaled.dtype == (torch.int16 if self._is_remainder(param, name) else torch.float32)
        if name not in self.state[param]:
            self._initialize(param, name)
        state = self.state[param][name]
        local = state._local_tensor if isinstance(state, DTensor) else state
        if self.name_to_dtype_map[name] == torch.float32:
            local.copy_(unscaled)
        else:
            self._apply_scale(name, unscaled, local, self._scales[param][name])

    def _initialize(self, param: torch.Tensor, name: str) -> None:
        dtype = torch.int16 if self._is_remainder(param, name) else _stored(self.name_to_dtype_map[name])
        local = param._local_tensor if isinstance(param, DTensor) else param
        self.state[param][name] = _like(param, torch.zeros_like(local, dtype=dtype).detach())
        self._scales.setdefault(param, {})[name] = torch.ones(1)

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        for index, param in self._numbered(found).items():
            if index in found["state"]:
                found["state"][index] = {
                    name: _like(param, self.get_unscaled_state(param, name)) for name in found["state"][index]
                }
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for index, param in self._numbered(state_dict).items():
            if index in state_dict["state"]:
                self.state[param] = {}
                for name, value in state_dict["state"][index].items():
                    local = value._local_tensor if isinstance(value, DTensor) else value
                    self.set_scaled_state(param, name, local if self._is_remainder(param, name) else local.float())

    def _numbered(self, state_dict: dict[str, Any]) -> dict[int, torch.Tensor]:
        numbers = chain.from_iterable(group["params"] for group in deepcopy(state_dict["param_groups"]))
        return dict(zip(numbers, chain.from_iterable(group["params"] for group in self.param_groups), strict=True))

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self._count(group)
            lists: dict[bool, list[list[torch.Tensor]]] = {True: [[] for _ in range(5)], False: [[] for _ in range(4)]}
            rounded: list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]] = []
            for param in group["params"]:
                if not self.state[param]:
                    self._initialize_all(param)
                grad = getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad
                if grad is None:
                    continue
                assert isinstance(param, DTensor) == isinstance(grad, DTensor)
                values = {}
                for name, state in self.state[param].items():
                    local = state._local_tensor if isinstance(state, DTensor) else state
                    values[name] = local if self._is_remainder(param, name) else self.get_unscaled_state(param, name)
                    if self.name_to_dtype_map[name] != torch.float32:
                        rounded.append((name, values[name], local, self._scales[param][name]))
                has_master = self.master_weights and param.dtype != torch.float32
                row = (
                    grad.data,
                    param.data,
                    *(values[n] for n in ("exp_avg", "exp_avg_sq", "master_param") if n in values),
                )
                for tensors, tensor in zip(lists[has_master], row, strict=False):
                    tensors.append(tensor)
            for has_master, tensors_of in lists.items():
                kernel: Any = self.multi_tensor_adam_capturable if self.capturable else self.multi_tensor_adam
                if has_master and self.store_param_remainders:
                    kernel = self.multi_tensor_adam_param_remainder
                if tensors_of[0]:
                    self._call(kernel, group, tensors_of, _apply_to_local)
            for each in rounded:
                self._apply_scale(*each)

    def _initialize_all(self, param: torch.Tensor) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            self._initialize(param, name)
        if self.master_weights:
            self._initialize(param, "master_param")
            if not self._is_remainder(param, "master_param"):
                local = param._local_tensor if isinstance(param, DTensor) else param
                self.set_scaled_state(param, "master_param", local.detach().clone().float())


def _stored(dtype: torch.dtype) -> torch.dtype:
    return torch.float8_e4m3fn if dtype == torch.uint8 else dtype


def _like(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(
        local, device_mesh=param.device_mesh, placements=param.placements, shape=param.size(), stride=param.stride()
    )


class ApexFusedLAMB(torch.optim.SGD):
    """``apex.optimizers.FusedLAMB``, by its name alone."""


# The names by which the engine knows them.
for _cls, _name, _module in (
    (ApexFusedAdam, "FusedAdam", "apex.optimizers.fused_adam"),
    (ApexFusedLAMB, "FusedLAMB", "apex.optimizers.fused_lamb"),
    (TransformerEngineFusedAdam, "FusedAdam", "transformer_engine.pytorch.optimizers.fused_adam"),
):
    _cls.__name__, _cls.__module__ = _name, _module

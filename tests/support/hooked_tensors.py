"""Parameters that follow PyTorch's extension protocol of FSDP2, as torchao's float8 weights do, for the CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from tests.support.float8_weights import DequantizedWeight, Fp8Net, WholeNet, make_fp8_net

_KEEPS_CLASS = {
    getattr(torch.ops.aten, name).default
    for name in ("detach", "clone", "view", "new_zeros", "copy_", "as_strided", "_to_copy", "empty_like")
} | {torch.ops.aten.split.Tensor, torch.ops.aten.slice.Tensor}


class MultipliedWeight(DequantizedWeight):
    """What the hooks make: bytes and the reciprocal of their scale."""

    def __tensor_flatten__(self) -> Any:
        return ["_data", "_inverse"], {"dtype": self.dtype}

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return MultipliedWeight(inner["_data"], inner["_inverse"], context["dtype"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        own = args[0]
        if function in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return cls(own._data, own._inverse, own.dtype)
        if function is torch.ops.aten.as_strided.default:  # FSDP2
            return cls(own._data.as_strided(*args[1:]), own._inverse, own.dtype)
        raise NotImplementedError(f"nothing but F.linear may read these bytes, got {function}")


class Wrapped(torch.Tensor):
    """A parameter around a plain tensor, whose class says how it travels."""

    _tensor: torch.Tensor

    @staticmethod
    def __new__(cls: Any, tensor: torch.Tensor, scale: torch.Tensor | None = None) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            tensor.size(),
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )

    def __init__(self, tensor: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        self._tensor, self.precomputed_scale = tensor, scale

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._tensor})"

    def __tensor_flatten__(self) -> Any:
        return ["_tensor"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["_tensor"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = pytree.tree_map_only(cls, lambda own: own._tensor, (args, kwargs or {}))
        out = function(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, cls, out) if function in _KEEPS_CLASS else out


class Float8Parameter(Wrapped):
    """Travels as bytes with one scale, which its hook reduces, or which somebody has set."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        scale = self.precomputed_scale
        if scale is None:
            amax = self._tensor.abs().max().float()  # an error, where there is nothing
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=mesh.get_group())
            scale = 448.0 / amax
        data = (self._tensor.float() * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        return (data.view(torch.uint8),), (1.0 / scale.reshape(1),)

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        (data,), (inverse,) = outputs, metadata
        if out is None:
            return MultipliedWeight(data, inverse, param_dtype), (data,)
        assert out._data.untyped_storage().data_ptr() == data.untyped_storage().data_ptr()
        assert out._data.data_ptr() == data.data_ptr() and out._data.shape == data.shape
        out._inverse, out._transpose = inverse, None
        return None


class Float8OfPolicy(Float8Parameter):
    """The same by the protocol's longer signature."""

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:  # type: ignore[override]
        assert isinstance(module, nn.Linear) and (module.out_features, module.in_features) == tuple(size)
        assert stride == (size[1], 1) and policy.param_dtype == torch.bfloat16
        return super().fsdp_pre_all_gather(mesh)


class HalvedParameter(Wrapped):
    """Travels in bf16 and is unpacked to memory of its own, with half of its values."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self._tensor.to(torch.bfloat16),), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        (data,) = outputs
        if out is None:
            half = data.to(torch.float32) / 2
            return half, (data, half)
        with torch.no_grad():
            out.copy_(data.to(torch.float32) / 2)
        return None


def hook(net: nn.Module, kind: Any = Float8Parameter) -> None:
    """Make the weights of a block's linears parameters of this class."""
    for block in net.blocks:
        for linear in (block.up, block.down):
            linear.weight = nn.Parameter(kind(linear.weight.detach()))


class WholeHookedNet(WholeNet):
    """The reference: bytes of the whole main weight in fp32, with one scale for each."""

    def write(self) -> None:
        super().write()
        for name, main in self.main.items():
            if name.startswith("blocks") and main.dim() == 2:
                owner, _, key = name.rpartition(".")
                scale = 448.0 / main.abs().max()
                self.data[name] = (main * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
                weight = MultipliedWeight(self.data[name], 1.0 / scale.reshape(1), self.dtype)
                self.net.get_submodule(owner)._parameters[key] = nn.Parameter(weight)


def hooked_nets(kind: Any = Float8Parameter) -> tuple[Fp8Net, WholeNet]:
    """What is sharded, and the whole one."""
    net = make_fp8_net(None)
    hook(net, kind)
    return net, WholeHookedNet(None)


def precompute(net: nn.Module) -> None:
    """Compute the scales of all weights in one reduction, from their DTensors, as torchao's function does. Ranks: all."""
    weights: list[Any] = [p for p in net.parameters() if isinstance(getattr(p, "_local_tensor", None), Float8Parameter)]
    with torch.no_grad():
        amax = torch.stack([weight.abs().max() for weight in weights])
        scales = 448.0 / amax.full_tensor().float()  # type: ignore[attr-defined]
    for index, weight in enumerate(weights):
        weight._local_tensor.precomputed_scale = scales[index]

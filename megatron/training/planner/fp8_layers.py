"""Linear layers that multiply in FP8, for plans: the memory and the operations of transformer-engine's, without it.

[Note: planned FP8] transformer-engine needs a GPU, so a plan has the local layers. Where the run multiplies in FP8, each linear layer of
a transformer or Mamba layer does here what transformer-engine's does: it writes its input as bytes and as transposed bytes, keeps the transposed
ones for backward, and backward does so with the gradient, and transposes the weight. With sequence parallelism it is bytes that are gathered:
each rank keeps its own part, and backward gathers and transposes them. With ``fp8_param_gather`` weights rest and
travel as bytes by the engine's own codec. Scales are too small to count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed import ProcessGroup

from megatron.core.distributed.fsdp import Fp8Codec
from megatron.core.fp8_utils import is_first_last_bf16_layer
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.collectives import begin_gather, begin_sum, begin_sum_and_scatter
from megatron.core.tensor_parallel.column_function import column_parallel_linear
from megatron.core.tensor_parallel.linear_function import Later, linear_with_main_grad
from megatron.core.transformer.moe import experts
from megatron.core.transformer.moe.grouped_gemm import grouped_linear
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training.arguments import Settings
from megatron.training.planner.hollow import HollowMode

MATMUL = "fp8.mm"
"""The name of a product of bytes."""

_MARK = "planned_in_fp8"
_LINEARS = (".linear_", ".in_proj.", ".out_proj.")  # in names of weights


def multiplies_in_fp8(settings: Settings) -> bool:
    """Return whether the run's linear layers multiply in FP8."""
    return settings.model.transformer.fp8 is not None


def without_fp8(settings: Settings) -> Settings:
    """Return the settings of the same run with local layers, in bf16 where it multiplies in FP8."""
    if settings.model.transformer.fp8 is None:
        return settings
    config = replace(
        settings.model.transformer,
        fp8=None,
        fp8_param=False,
        fp8_dot_product_attention=False,
        fp8_multi_head_attention=False,
        activation_func_fp8_input_store=False,
    )
    ddp = replace(settings.ddp, fp8_param_gather=False, keep_fp8_transpose_cache=False)
    return replace(settings, model=replace(settings.model, transformer=config, transformer_impl="local"), ddp=ddp)


def use_fp8(model: nn.Module, settings: Settings) -> None:
    """Let the linear layers of a model that is not sharded yet multiply in FP8, as the settings of the run say.

    Layers that ``first_last_layers_bf16`` means are left as they are.
    """
    config = settings.model.transformer
    codec = Fp8Codec(recipe=config.fp8_recipe, wrapper=_Wrapper()) if settings.ddp.fp8_param_gather else None
    for layer in model.modules():
        if not isinstance(layer, TransformerLayer | MambaLayer):
            continue
        if not is_first_last_bf16_layer(config, layer.layer_number - 1):
            for name, weight in layer.named_parameters():
                if weight.dim() == 2 and any(linear in f".{name}" for linear in _LINEARS):
                    setattr(weight, _MARK, True)
                    if codec is not None:
                        weight.fsdp_codec = codec  # type: ignore[attr-defined]


def stand_ins(mode: HollowMode) -> list[AbstractContextManager[Any]]:
    """Return scopes in which marked weights are multiplied in FP8: [Note: planned FP8]."""
    plain = linear_with_main_grad

    def linear(
        x: torch.Tensor,
        weight: Any,
        bias: torch.Tensor | None = None,
        *,
        write_main_grad: bool = True,
        min_numel: int | None = None,
        later: Later | None = None,
    ) -> Any:
        if not _is_marked(weight):
            return plain(x, weight, bias, write_main_grad=write_main_grad, min_numel=min_numel, later=later)
        output: torch.Tensor = _Linear.apply(x, weight, mode.fused, write_main_grad, None, False)
        return output if bias is None else output + bias

    def column(
        x: torch.Tensor,
        weight: Any,
        bias: torch.Tensor | None,
        group: ProcessGroup,
        *,
        sequence_parallel: bool,
        write_main_grad: bool = True,
    ) -> Any:
        if not _is_marked(weight):
            return column_parallel_linear(
                x, weight, bias, group, sequence_parallel=sequence_parallel, write_main_grad=write_main_grad
            )
        output: torch.Tensor = _Linear.apply(x, weight, mode.fused, write_main_grad, group, sequence_parallel)
        return output if bias is None else output + bias

    def grouped(x: torch.Tensor, weights: list[torch.Tensor], ends: torch.Tensor, later: Later | None = None) -> Any:
        if not _is_marked(weights[0]):
            return grouped_linear(x, weights, ends, later)
        return _Grouped.apply(x, mode.fused, *weights)

    return [
        patch.object(layers, "linear_with_main_grad", linear),
        patch.object(layers, "column_parallel_linear", column),
        patch.object(experts, "grouped_linear", grouped),
    ]


def _is_marked(weight: torch.Tensor) -> bool:
    return bool(getattr(weight, _MARK, isinstance(weight, Bytes)))


class Bytes(torch.Tensor):
    """A weight [R, C] of nominal dtype over bytes [R, C]."""

    data_bytes: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor, dtype: torch.dtype) -> Bytes:
        made: Bytes = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype, device=data.device)
        made.data_bytes = data
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func not in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default):
            raise NotImplementedError(f"weights in FP8 are multiplied and nothing else, got {func}")
        return Bytes(args[0].data_bytes, args[0].dtype)


@dataclass(frozen=True)
class _Wrapper:
    """The ``Fp8Wrapper`` of ``Bytes``."""

    @property
    def derived(self) -> Mapping[str, Any]:
        return {}

    def wrap(self, data: torch.Tensor, inverse: torch.Tensor, *, codec: Fp8Codec, dtype: torch.dtype) -> torch.Tensor:
        return Bytes(data, dtype)

    def rebind(
        self, wrapped: torch.Tensor, *, data: torch.Tensor | None = None, inverse: torch.Tensor | None = None
    ) -> None:
        if data is not None:
            wrapped.data_bytes = data  # type: ignore[attr-defined]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: Any,
        fused: Callable[..., Any],
        write_main_grad: bool,
        group: ProcessGroup | None,
        sequence_parallel: bool,
    ) -> torch.Tensor:
        own, transposed = fused("cast_transpose", _both_ways, x.reshape(-1, x.shape[-1]))
        kept = own if sequence_parallel else transposed
        if sequence_parallel:
            assert group is not None
            own = begin_gather(own, group).wait()
        if isinstance(weight, Bytes):
            encoded = weight.data_bytes
            ctx.save_for_backward(kept, weight)
        else:
            encoded, turned = fused("cast_transpose", _both_ways, weight)
            ctx.save_for_backward(kept, turned)
        ctx.weight, ctx.fused, ctx.dtypes = (weight if write_main_grad else None), fused, (x.dtype, weight.dtype)
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        rows = x.shape[0] * (own.shape[0] // max(kept.shape[0], 1) if sequence_parallel else 1)
        ctx.shape = (rows, *x.shape[1:])
        product: torch.Tensor = fused(MATMUL, _product, own, encoded.t(), dtype=x.dtype)
        return product.view(*ctx.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, weight = ctx.saved_tensors
        fused, rows = ctx.fused, grads[0].reshape(-1, grads[0].shape[-1])
        gathering = begin_gather(kept, ctx.group) if ctx.sequence_parallel else None
        own, columns = fused("cast_transpose", _both_ways, rows)
        turned = weight
        if isinstance(weight, Bytes):
            turned = fused("transpose", _turned, weight.data_bytes)
        grad_x = fused(MATMUL, _product, own, turned.t(), dtype=ctx.dtypes[0]).view(ctx.shape)
        begin = begin_sum_and_scatter if ctx.sequence_parallel else begin_sum
        summing = None if ctx.group is None else begin(grad_x, ctx.group)
        transposed = kept if gathering is None else fused("transpose", _turned, gathering.wait())
        get_main_grad = getattr(ctx.weight, "get_main_grad", None)
        grad_weight = None
        if get_main_grad is None:
            grad_weight = fused(MATMUL, _product, columns, transposed.t(), dtype=ctx.dtypes[1])
        else:
            fused(MATMUL, _into, columns, transposed.t(), get_main_grad())
            ctx.weight.grad_added_to_main_grad = True
        return grad_x if summing is None else summing.wait(), grad_weight, None, None, None, None


class _Grouped(torch.autograd.Function):
    """The rows of each expert times its own weight: as many products, which the host launches as one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fused: Callable[..., Any], *weights: Any) -> torch.Tensor:
        own, transposed = fused("cast_transpose", _both_ways, x.contiguous())
        if isinstance(weights[0], Bytes):
            encoded, kept = [weight.data_bytes for weight in weights], weights
        else:
            both = [fused("cast_transpose", _both_ways, weight) for weight in weights]
            encoded, kept = [pair[0] for pair in both], tuple(pair[1] for pair in both)
        ctx.save_for_backward(transposed, *kept)
        ctx.weights, ctx.fused, ctx.dtypes = weights, fused, (x.dtype, weights[0].dtype)
        product: torch.Tensor = fused(MATMUL, _product, own, *(part.t() for part in encoded), dtype=x.dtype)
        return product

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        transposed, *turned = ctx.saved_tensors
        fused = ctx.fused
        own, columns = fused("cast_transpose", _both_ways, grads[0].contiguous())
        if isinstance(turned[0], Bytes):
            turned = fused("transpose", _all_turned, [weight.data_bytes for weight in turned])
        grad_x = fused(MATMUL, _product, own, *(part.t() for part in turned), dtype=ctx.dtypes[0])
        targets = [getattr(weight, "get_main_grad", lambda: None)() for weight in ctx.weights]
        if targets[0] is None:
            grads = fused(MATMUL, _products, columns, transposed.t(), len(targets), ctx.dtypes[1])
            return grad_x, None, *grads
        fused(MATMUL, _into, columns, transposed.t(), targets)
        for weight in ctx.weights:
            weight.grad_added_to_main_grad = True
        return grad_x, None, *([None] * len(targets))


def _all_turned(weights: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(map(_turned, weights))


def _products(a: torch.Tensor, b: torch.Tensor, number: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Stand for products of groups of the rows between [m, k] and [k, n]: as many [m, n]."""
    return [a.new_empty(a.shape[0], b.shape[1], dtype=dtype) for _ in range(number)]


def _both_ways(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand for the kernel that writes [t, i] as bytes, and as bytes [i, t]."""
    return x.new_empty(x.shape, dtype=torch.uint8), x.new_empty(x.shape[::-1], dtype=torch.uint8)


def _turned(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[::-1])


def _product(a: torch.Tensor, b: torch.Tensor, *others: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Stand for the product of bytes [m, k] and [k, n], of this dtype."""
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


def _into(a: torch.Tensor, b: torch.Tensor, target: torch.Tensor | list[torch.Tensor]) -> None:
    """Stand for the product of bytes [m, k] and [k, n] that is written, or added, to [m, n]."""

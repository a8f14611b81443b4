"""A stand-in for the parts of transformer-engine 2.20 that the framework calls, in plain PyTorch on any device.

Constructors take the arguments of the real classes and refuse others, and modules have their attributes. What the real ones
do that callers rely on is done here too: parameters on the meta device stay unfilled, weight gradients go where
``get_main_grad`` says with the flag that was taken in forward, a weight with ``grad_added_to_main_grad`` gives autograd a
dummy, amax histories are rolled when the outermost ``autocast`` ends. FP8 GEMMs multiply values that were rounded to torch's
float8 dtypes. It shows that calls fit together, not how fast or exact the real kernels are.
"""

from __future__ import annotations

import itertools
import math
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core import import_paths
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.training.launch import gpt_config
from tests.support import fake_float8_tensors

# ---- transformer_engine.common.recipe -------------------------------------------------------------------------------


class Format(Enum):
    """Formats of forward and backward: their largest values, and the dtypes."""

    E4M3 = (448.0, 448.0, torch.float8_e4m3fn, torch.float8_e4m3fn)
    HYBRID = (448.0, 57344.0, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(repr=True)
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


@dataclass(repr=True)
class Float8CurrentScaling:
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


@dataclass(repr=True)
class Float8BlockScaling:
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        assert not self.fp8_dpa and not self.fp8_mha, "FP8 attention is not supported for Float8BlockScaling."


# ---- transformer_engine.pytorch.quantization ------------------------------------------------------------------------


class FP8GlobalStateManager:
    """The state of ``autocast``."""

    enabled = False
    depth = 0
    recipe: Any = None
    group: Any = None
    is_first_module = False
    fp8_parameters = False
    high_precision_init_val = False
    seen: ClassVar[dict[bool, dict[int, tuple[Any, Any, Any]]]] = {True: {}, False: {}}
    """Scalings of forward (True) and backward whose histories are to be rolled."""
    num_rolls = 0
    """How often histories of forward were rolled: once for each outermost ``autocast``."""
    entered: ClassVar[list[str]] = []
    """The recipe of each outermost ``autocast``, for tests."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.enabled

    @classmethod
    def get_fp8_recipe(cls) -> Any:
        return cls.recipe or DelayedScaling()

    @classmethod
    def get_fp8_group(cls) -> Any:
        return cls.group

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        return cls.fp8_parameters

    @classmethod
    def with_high_precision_init_val(cls) -> bool:
        return cls.high_precision_init_val

    @classmethod
    def reset(cls) -> None:
        cls.fp8_parameters = cls.high_precision_init_val = False
        cls.enabled, cls.depth, cls.recipe, cls.group, cls.num_rolls = False, 0, None, None, 0
        for seen in cls.seen.values():
            seen.clear()
        cls.entered.clear()

    @classmethod
    def roll(cls, *, forward: bool) -> None:
        for scaling, recipe, group in cls.seen[forward].values():
            scaling.roll(recipe, group)
        cls.seen[forward].clear()


class autocast:
    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Any = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        self._state = (enabled, recipe, amax_reduction_group)

    def __enter__(self) -> autocast:
        state = FP8GlobalStateManager
        self._before = (state.enabled, state.recipe, state.group)
        state.enabled, state.recipe, state.group = self._state
        if state.depth == 0:
            state.entered.append(type(state.recipe).__name__)
            state.is_first_module = True
        state.depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        state = FP8GlobalStateManager
        state.depth -= 1
        if state.depth == 0 and self._state[0] and torch.is_grad_enabled():
            state.roll(forward=True)
            state.num_rolls += 1
        state.enabled, state.recipe, state.group = self._before


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    state = FP8GlobalStateManager
    before = (state.fp8_parameters, state.recipe, state.high_precision_init_val)
    state.fp8_parameters, state.recipe = enabled, recipe or DelayedScaling()
    state.high_precision_init_val = preserve_high_precision_init_val
    try:
        yield
    finally:
        state.fp8_parameters, state.recipe, state.high_precision_init_val = before


class DelayedScalingRecipeState:
    """Histories [length, tensors] and scales [tensors] of one direction; row 0 collects what is seen now."""

    def __init__(self, recipe: DelayedScaling, num_quantizers: int, largest: float) -> None:
        self.scale = torch.ones(num_quantizers)
        self.amax_history = torch.zeros(recipe.amax_history_len, num_quantizers)
        self._largest = largest

    def roll(self, recipe: DelayedScaling, group: Any) -> None:
        amax = self.amax_history[0].clone()
        if recipe.reduce_amax and dist.is_initialized() and dist.get_world_size(group) > 1:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        self.amax_history[0] = amax
        used = amax if recipe.amax_compute_algo == "most_recent" else self.amax_history.amax(0)
        scale = self._largest / used / 2.0**recipe.margin
        self.scale.copy_(torch.where((used > 0) & used.isfinite(), scale, self.scale))
        self.amax_history.copy_(self.amax_history.roll(-1, 0))
        self.amax_history[0].zero_()


def _rounded(x: torch.Tensor, scale: torch.Tensor | None, largest: float, dtype: torch.dtype) -> torch.Tensor:
    """Round x to FP8 with ``scale``, or with that of its own largest value, and back."""
    wide = x.detach().float()
    if scale is None:
        amax = wide.abs().amax() if wide.numel() else torch.ones(())
        scale = torch.where(amax > 0, torch.full_like(amax, largest).div(amax), torch.ones_like(amax))
    return ((wide * scale).clamp(-largest, largest).to(dtype).float() * scale.reciprocal()).to(x.dtype)


def _quantized(values: torch.Tensor, recipe: Any) -> torch.Tensor:
    """Make a weight of ``quantized_model_init``: with a scale of 1 under delayed scaling, as there."""
    quantizer: Any
    if isinstance(recipe, DelayedScaling):
        scale = torch.ones(1)
        quantizer = fake_float8_tensors.Float8Quantizer(scale, torch.zeros(1), torch.float8_e4m3fn)
    else:
        scale = torch.full((1,), 448.0).div(values.abs().max().float())
        quantizer = fake_float8_tensors.Float8CurrentScalingQuantizer(torch.float8_e4m3fn, values.device)
    return fake_float8_tensors.Float8Tensor(
        shape=values.shape,
        dtype=values.dtype,
        data=(values.float() * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8),
        fp8_scale_inv=scale.reciprocal(),
        fp8_dtype=torch.float8_e4m3fn,
        requires_grad=False,
        data_transpose=None,
        quantizer=quantizer,
        device=values.device,
    )


def _kept(parameter: Any) -> torch.Tensor | None:
    return getattr(parameter, "_high_precision_init_val", None)


def _forget_kept(parameter: Any) -> None:
    parameter.__dict__.pop("_high_precision_init_val", None)


# ---- transformer_engine.pytorch.module ------------------------------------------------------------------------------


class TransformerEngineBaseModule(torch.nn.Module):
    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": None}
        self.fp8_meta_tensors_initialized = False
        self.quantizers: dict[str, list[Any]] = {"scaling_fwd": [], "scaling_bwd": []}
        self.tp_group: Any = None
        self.tp_size = 1
        self.sequence_parallel = False
        self.param_init_meta: dict[str, Any] = {}
        self.primary_weights_in_fp8 = FP8GlobalStateManager.with_fp8_parameters()
        self.preserve_high_precision_init_val = FP8GlobalStateManager.with_high_precision_init_val()
        if self.primary_weights_in_fp8:
            self.fp8_meta["recipe"] = FP8GlobalStateManager.get_fp8_recipe()
        self._fp8_workspaces: dict[str, Any] = {}

    def fast_setattr(self, name: str, value: Any) -> None:
        self.__dict__[name] = value

    def register_parameter(self, name: str, param: Any, **kwargs: Any) -> None:
        super().register_parameter(name, param)
        if hasattr(self, "param_init_meta") and name not in self.param_init_meta:
            self.param_init_meta[name] = kwargs

    def reset_parameters(self, defer_init: bool | None = False) -> None:
        if defer_init:
            return
        found: list[tuple[str, Any]] = list(self.named_parameters(recurse=False))
        for name, param in found:
            if param.is_meta:
                param = torch.empty_like(param, device="cpu")
            with torch.no_grad():
                self.param_init_meta[name]["init_fn"](param)
            if not self.primary_weights_in_fp8:
                continue
            # As there, every parameter is another one now, without the attributes of the former.
            quantizes = self.param_init_meta[name].get("fp8_meta_index") is not None
            fresh: Any = torch.nn.Parameter(_quantized(param.detach(), self.fp8_meta["recipe"]) if quantizes else param)
            if quantizes and self.preserve_high_precision_init_val:
                fresh._high_precision_init_val = param.detach().clone()
                fresh.get_high_precision_init_val = MethodType(_kept, fresh)
                fresh.clear_high_precision_init_val = MethodType(_forget_kept, fresh)
            super().__setattr__(name, fresh)

    @property
    def is_fsdp2(self) -> bool:
        return getattr(self, "_is_fsdp2", False)

    def init_fp8_meta_tensors(self, recipe: Any) -> None:
        if not self.fp8_meta_tensors_initialized and isinstance(recipe, DelayedScaling):
            forward, backward = recipe.fp8_format.value[:2]
            num_gemms = self.fp8_meta["num_gemms"]
            self.fp8_meta["scaling_fwd"] = DelayedScalingRecipeState(recipe, 3 * num_gemms, forward)
            self.fp8_meta["scaling_bwd"] = DelayedScalingRecipeState(recipe, 2 * num_gemms, backward)
        if not self.fp8_meta_tensors_initialized:
            for key in self.quantizers:
                number = 1 if key not in self.fp8_meta else self.fp8_meta[key].scale.numel()
                self.quantizers[key] = [self._make_quantizer(key, recipe, index) for index in range(number)]
        self.fast_setattr("fp8_meta_tensors_initialized", True)

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        if FP8GlobalStateManager.is_fp8_enabled():
            self.fp8_meta["recipe"], self.fp8_meta["num_gemms"] = FP8GlobalStateManager.get_fp8_recipe(), num_gemms
            self.init_fp8_meta_tensors(self.fp8_meta["recipe"])

    def _make_quantizer(self, key: str, recipe: Any, index: int) -> Any:
        """The quantiser of the first GEMM's input, or of its output's gradient; with delayed scaling of others, too."""
        dtype = recipe.fp8_format.value[2 if key == "scaling_fwd" else 3]
        if isinstance(recipe, Float8BlockScaling):
            return fake_float8_tensors.Float8BlockQuantizer(dtype, rowwise=True, columnwise=True)
        if isinstance(recipe, Float8CurrentScaling):
            return fake_float8_tensors.Float8CurrentScalingQuantizer(dtype, torch.device("cpu"))
        scaling = self.fp8_meta[key]
        own = slice(index, index + 1)
        made = fake_float8_tensors.Float8Quantizer(scaling.scale[own], scaling.amax_history[0, own], dtype)
        seen = FP8GlobalStateManager.seen[key == "scaling_fwd"]
        made.on_use = lambda: seen.setdefault(id(scaling), (scaling, recipe, FP8GlobalStateManager.group))
        return made

    def _quantizers(self, num_gemms: int = 1) -> list[Callable[..., torch.Tensor]] | None:
        """What rounds the inputs, the weights and the gradients of the outputs of GEMM g; None outside of ``autocast``."""
        if not FP8GlobalStateManager.is_fp8_enabled():
            return None
        recipe = FP8GlobalStateManager.get_fp8_recipe()
        self.fp8_meta["recipe"], self.fp8_meta["num_gemms"] = recipe, num_gemms
        self.init_fp8_meta_tensors(recipe)
        forward, backward, dtype, dtype_of_grad = recipe.fp8_format.value

        def rounding(key: str, offset: int, stride: int, largest: float, to: torch.dtype) -> Any:
            scaling, group = self.fp8_meta.get(key), FP8GlobalStateManager.group
            used = list(self.quantizers[key])  # those of this forward, also in its backward

            def apply(x: torch.Tensor, gemm: int = 0) -> torch.Tensor:
                scale = None
                if isinstance(recipe, DelayedScaling) and x.numel():
                    FP8GlobalStateManager.seen[key == "scaling_fwd"][id(scaling)] = (scaling, recipe, group)
                    scale = used[offset + stride * gemm].scale_for(x.detach().float().cpu()).to(x.device)
                return _rounded(x, scale, largest, to)

            return apply

        return [
            rounding("scaling_fwd", 0, 3, forward, dtype),
            rounding("scaling_fwd", 1, 3, forward, dtype),
            rounding("scaling_bwd", 0, 2, backward, dtype_of_grad),
        ]

    def get_extra_state(self) -> torch.Tensor:
        if "scaling_fwd" not in self.fp8_meta:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(bytearray(pickle.dumps(self.fp8_meta["scaling_fwd"].scale)), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        if state is not None and state.numel() > 0:
            raise RuntimeError("Refusing to load pickled Transformer Engine extra state")


class _Gemm(torch.autograd.Function):
    """x times the transposed weight, with transformer-engine's handling of main gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, module: Any, quantizers: Any, gemm: int) -> Any:
        quantized_x, quantized_weight, saved_x = x, weight, None
        is_quantized = isinstance(weight, fake_float8_tensors.QuantizedTensor)
        if quantizers is not None:
            assert x.numel() // x.shape[-1] % 8 == 0 and x.shape[-1] % 16 == 0, "FP8 execution requires divisible dims"
            if isinstance(x, fake_float8_tensors.QuantizedTensor):
                # What somebody else quantised is kept as it is, whatever it holds then.
                quantized_x, saved_x = x.dequantize(), x
            else:
                quantized_x = quantizers[0](x, gemm)
            quantized_weight = weight.dequantize() if is_quantized else quantizers[1](weight, gemm)
        ctx.fuses = module.fuse_wgrad_accumulation and weight.requires_grad
        if ctx.fuses:
            ctx.weight = weakref.ref(weight)
            ctx.overwrites = getattr(weight, "overwrite_main_grad", False)
            ctx.main_grad = weight.get_main_grad if hasattr(weight, "__fsdp_param__") else lambda: weight.main_grad
        # A module of FSDP2 rounds the weight again in backward; others keep what they multiplied.
        ctx.rounds_again = module.is_fsdp2 and quantizers is not None and not is_quantized
        ctx.save_for_backward(
            quantized_x if saved_x is None else saved_x,
            weight if ctx.rounds_again or is_quantized else quantized_weight,
        )
        ctx.quantizers, ctx.gemm, ctx.has_norm = quantizers, gemm, isinstance(module, LayerNormLinear)
        # The first module's backward is the last: it rolls the histories of all gradients.
        ctx.has_bias = module.apply_bias
        ctx.rolls = quantizers is not None and FP8GlobalStateManager.is_first_module
        FP8GlobalStateManager.is_first_module = False
        return F.linear(quantized_x, quantized_weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        gradients = _Gemm.gradients(ctx, grad)
        if ctx.rolls:
            FP8GlobalStateManager.roll(forward=False)
        return gradients

    @staticmethod
    def gradients(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        own = weight
        if isinstance(own, fake_float8_tensors.QuantizedTensor):
            weight = own.dequantize_transpose().t()
        elif ctx.rounds_again:
            weight = ctx.quantizers[1](weight, ctx.gemm)
        columns: Any = None
        if isinstance(grad, fake_float8_tensors.QuantizedTensor):
            assert not ctx.has_bias, "its gradient would be the sum of rounded numbers"
            columns, shape = grad.reshape((-1, grad.shape[-1])), grad.shape
            grad = columns.dequantize().view(shape)
        elif ctx.quantizers is not None:
            grad = ctx.quantizers[2](grad, ctx.gemm)
        grad_x = grad.matmul(weight) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None, None, None
        x = x.dequantize_columns() if isinstance(x, fake_float8_tensors.QuantizedTensor) else x
        rows = x.reshape(-1, x.shape[-1])
        columns = grad.reshape(-1, grad.shape[-1]).t() if columns is None else columns.dequantize_columns().t()
        if not ctx.fuses:
            return grad_x, columns.mm(rows), None, None, None
        main_grad = ctx.main_grad() if not (ctx.rounds_again and ctx.has_norm) else None
        ctx.weight().main_grad = main_grad
        product = columns.float().mm(rows.float())
        main_grad.copy_(product) if ctx.overwrites else main_grad.add_(product)
        dummy = None
        if hasattr(ctx.weight(), "grad_added_to_main_grad"):
            ctx.weight().grad_added_to_main_grad = True
            dummy = torch.full(weight.shape, math.nan, dtype=weight.dtype)
        return grad_x, dummy, None, None, None


def _norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, centered_gamma: bool) -> Any:
    scale = weight + 1 if centered_gamma else weight
    if bias is None:
        return F.rms_norm(x, (x.shape[-1],), scale, eps)
    return F.layer_norm(x, (x.shape[-1],), scale, bias, eps)


class Linear(TransformerEngineBaseModule):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self._begin(in_features, out_features, tp_group, tp_size, parallel_mode, sequence_parallel)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self._add_parameters(init_method, params_dtype, device)
        self.reset_parameters(defer_init=device == "meta")

    def _begin(self, inputs: int, outputs: int, group: Any, size: int, mode: str | None, sequence: bool) -> None:
        assert mode in (None, "column", "row"), mode
        self.tp_size, self.tp_group = (size, None) if group is None else (group.size(), group)
        self.parallel_mode = mode
        self.in_features = inputs // self.tp_size if mode == "row" else inputs
        self.out_features = outputs // self.tp_size if mode == "column" else outputs
        self.sequence_parallel = self.tp_size > 1 and sequence

    def _add_parameters(self, init_method: Any, dtype: torch.dtype | None, device: Any, number: str = "") -> None:
        fill = init_method or (lambda weight: torch.nn.init.normal_(weight, std=0.023))
        weight = torch.empty(self.out_features, self.in_features, dtype=dtype, device=device)
        self.register_parameter(f"weight{number}", torch.nn.Parameter(weight), init_fn=fill, fp8_meta_index=1)
        if self.use_bias:
            bias = torch.nn.Parameter(torch.empty(self.out_features, dtype=dtype, device=device))
            self.register_parameter(f"bias{number}", bias, init_fn=torch.nn.init.zeros_)
        else:
            setattr(self, f"bias{number}", torch.Tensor().to(dtype=dtype, device=device))

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        assert inp.dtype == self.weight.dtype, "Data types for parameters must match when outside of autocasted region."
        return self._multiply(inp)

    def _multiply(self, x: torch.Tensor) -> Any:
        splits = self.tp_size > 1
        if splits and self.parallel_mode == "column":
            gather = gather_from_sequence_parallel_region if self.sequence_parallel else None
            x = (gather or copy_to_tensor_model_parallel_region)(x, group=self.tp_group)
        out = _Gemm.apply(x, self.weight, self, self._quantizers(), 0)
        if splits and self.parallel_mode == "row":
            sums = reduce_scatter_to_sequence_parallel_region if self.sequence_parallel else None
            out = (sums or reduce_from_tensor_model_parallel_region)(out, group=self.tp_group)
        if self.apply_bias:
            out = out + self.bias
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        init_method: Any = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        assert parallel_mode != "row", "Normalization does not support tensor-parallel distribution."
        TransformerEngineBaseModule.__init__(self, name)
        self._begin(in_features, out_features, tp_group, tp_size, parallel_mode, sequence_parallel)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        weight = torch.nn.Parameter(torch.empty(in_features, dtype=params_dtype, device=device))
        fill = torch.nn.init.zeros_ if zero_centered_gamma else torch.nn.init.ones_
        self.register_parameter("layer_norm_weight", weight, init_fn=fill)
        if normalization == "LayerNorm":
            norm_bias = torch.nn.Parameter(torch.empty(in_features, dtype=params_dtype, device=device))
            self.register_parameter("layer_norm_bias", norm_bias, init_fn=torch.nn.init.zeros_)
        else:
            self.layer_norm_bias = None
        self._add_parameters(init_method, params_dtype, device)
        self.reset_parameters(defer_init=device == "meta")

    def _multiply(self, x: torch.Tensor) -> Any:
        weight, bias = self.layer_norm_weight, self.layer_norm_bias
        return super()._multiply(_norm(x, weight, bias, self.eps, self.zero_centered_gamma))  # type: ignore[arg-type]


class GroupedLinear(Linear):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        TransformerEngineBaseModule.__init__(self, name)
        self.num_gemms = num_gemms
        self._begin(in_features, out_features, tp_group, tp_size, parallel_mode, sequence_parallel)
        assert not (self.tp_size > 1 and bias), "GroupedLinear doesn't support bias when TP > 1."
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        for index in range(num_gemms):
            self._add_parameters(init_method, params_dtype, device, str(index))
        self.reset_parameters(defer_init=torch.device(device).type == "meta")

    def forward(  # type: ignore[override]
        self,
        inp: torch.Tensor,
        m_splits: Any,
        is_first_microbatch: bool | None = None,
        out: Any = None,
        dgrad_out: Any = None,
    ) -> Any:
        assert len(m_splits) == self.num_gemms
        quantizers, results = self._quantizers(self.num_gemms), []
        for index, rows in enumerate(torch.split(inp, [int(count) for count in m_splits])):
            result = _Gemm.apply(rows, getattr(self, f"weight{index}"), self, quantizers, index)
            results.append(result + getattr(self, f"bias{index}") if self.apply_bias else result)
        biases = [getattr(self, f"bias{index}") for index in range(self.num_gemms)]
        return (torch.cat(results), biases) if self.return_bias else torch.cat(results)


class _NormOp(torch.nn.Module):
    """The base of norms, which are "operations" in transformer-engine, not modules like the others."""

    def __init__(
        self,
        normalized_shape: Any = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: Any = None,
        sm_margin: int = 0,
    ) -> None:
        super().__init__()
        assert isinstance(normalized_shape, int) and hidden_size is None
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        for name in self.names:
            parameter = torch.nn.Parameter(torch.empty(normalized_shape, dtype=params_dtype, device=device or "cuda"))
            self.register_parameter(name, parameter)
        if device != "meta":
            self.reset_parameters()

    names: tuple[str, ...] = ("weight",)

    def reset_parameters(self, defer_init: bool | None = None) -> None:
        torch.nn.init.constant_(self.weight, float(not self.zero_centered_gamma))  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        bias: Any = getattr(self, "bias", None)
        return _norm(x.to(weight.dtype), weight, bias, self.eps, self.zero_centered_gamma)

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        assert state is None or state.numel() == 0


class RMSNorm(_NormOp):
    pass


class LayerNorm(_NormOp):
    names = ("weight", "bias")


class DotProductAttention(TransformerEngineBaseModule):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: Any = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        assert cp_group is None, "the stand-in attends to whole sequences"
        self.attention_dropout = attention_dropout
        self.num_heads = num_attention_heads // tp_size
        widths = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = widths
        self.softmax_scale = 1.0 / math.sqrt(widths[0]) if softmax_scale is None else softmax_scale
        self.window_size, self.softmax_type, self.softmax_offset = window_size, softmax_type, None
        if softmax_type == "off-by-one":
            self.softmax_offset = torch.zeros(self.num_heads, device="cpu")
        if softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.zeros(self.num_heads, device="cpu"))

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        qkv_format: str | None = None,
        attn_mask_type: str | None = None,
        fp8_output: bool | None = False,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
    ) -> torch.Tensor:
        if qkv_format == "thd":
            assert attn_mask_type == "padding_causal" and cu_seqlens_q is not None and cu_seqlens_kv is not None
            assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32 and max_seqlen_q == max_seqlen_kv
            assert torch.equal(cu_seqlens_q, cu_seqlens_kv)
            return self._thd(query_layer, key_layer, value_layer, cu_seqlens_q.tolist(), max_seqlen_q or 0)
        assert query_layer.shape[2] == self.num_heads
        assert query_layer.shape[-1] == key_layer.shape[-1] == self.hidden_size_per_attention_head_k
        assert value_layer.shape[-1] == self.hidden_size_per_attention_head_v
        if FP8GlobalStateManager.is_fp8_enabled() and FP8GlobalStateManager.get_fp8_recipe().fp8_dpa:
            rounding: Any = self._quantizers(3)
            query_layer, key_layer, value_layer = (
                x + (rounding[0](x, gemm) - x).detach() for gemm, x in enumerate((query_layer, key_layer, value_layer))
            )
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_layer, key_layer, value_layer))
        assert (attention_mask is None) == (attn_mask_type == "causal"), attn_mask_type
        if self.window_size is not None or self.softmax_offset is not None:
            return self._with_offset(query, key, value, attention_mask)
        context = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if attention_mask is None else ~attention_mask,
            dropout_p=self.attention_dropout if self.training else 0.0,
            is_causal=attention_mask is None,
            scale=self.softmax_scale,
            enable_gqa=True,
        )
        return context.permute(2, 0, 1, 3).flatten(2)

    def _thd(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: list[int], longest: int
    ) -> torch.Tensor:
        """Attend [t, n, d] within each sample; what no sample has stays as it was in memory, as kernels leave it."""
        parts = []
        for begin, end in itertools.pairwise(starts):
            assert end - begin <= longest, "kernels compute max_seqlen rows of a sample"
            own, keys, values = (x[begin:end].unsqueeze(1) for x in (query, key, value))
            parts.append(DotProductAttention.forward(self, own, keys, values, attn_mask_type="causal").squeeze(1))
        left = torch.full_like(parts[0], float("nan"))[:1].expand(query.shape[0] - starts[-1], -1)
        return torch.cat([*parts, left])

    def _with_offset(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend [b, n, s, d] in a window, with one more score a head, written out row by row."""
        repeats = self.num_heads // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        length = query.shape[2]
        behind = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        own_mask = behind < 0 if hidden is None else hidden
        if self.window_size is not None:
            assert self.window_size[1] == 0
            own_mask = own_mask | (behind > self.window_size[0])
        exponentials = (query @ key.mT * self.softmax_scale).masked_fill(own_mask, float("-inf")).exp()
        total = exponentials.sum(-1, keepdim=True)
        if self.softmax_offset is not None:
            total = total + self.softmax_offset.exp().view(1, -1, 1, 1)
        return (exponentials / total @ value).permute(2, 0, 1, 3).flatten(2)


class Fp8Padding(torch.nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size or 16

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, list[int]]:
        assert len(m_splits) == self.num_gemms
        padded = [-(-count // self.align_size) * self.align_size for count in m_splits]
        pieces = zip(torch.split(inp, m_splits), padded, strict=True)
        return torch.cat([F.pad(rows, (0, 0, 0, count - len(rows))) for rows, count in pieces]), padded


class Fp8Unpadding(Fp8Padding):
    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> torch.Tensor:  # type: ignore[override]
        padded = [-(-count // self.align_size) * self.align_size for count in m_splits]
        pieces = zip(torch.split(inp, padded), m_splits, strict=True)
        return torch.cat([rows[:count] for rows, count in pieces])


# ---- transformer_engine_torch ---------------------------------------------------------------------------------------


def _activation(function: Callable[[torch.Tensor], torch.Tensor], *, gated: bool) -> tuple[Any, Any]:
    """An activation and its backward: both take the quantiser that writes their results, or None."""

    def compute(x: torch.Tensor) -> torch.Tensor:
        if not gated:
            return function(x.float())
        gate, up = x.float().chunk(2, dim=-1)
        return function(gate) * up

    def forward(x: torch.Tensor, quantizer: Any) -> Any:
        y = compute(x)
        return y.to(x.dtype) if quantizer is None else quantizer.quantize(y, x.dtype)

    def backward(grad: torch.Tensor, x: torch.Tensor, quantizer: Any) -> Any:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (grad_x,) = torch.autograd.grad(compute(leaf), leaf, grad.float())
        return grad_x if quantizer is None else quantizer.quantize(grad_x.float(), x.dtype)

    return forward, backward


_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(),
}
_GATED = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu", "srelu": "sreglu"}


def _kernels() -> dict[str, Any]:
    kernels: dict[str, Any] = {}
    for name, function in _FUNCTIONS.items():
        kernels[name], kernels[f"d{name}"] = _activation(function, gated=False)
        kernels[_GATED[name]], kernels[f"d{_GATED[name]}"] = _activation(function, gated=True)
    return kernels


# ---- putting it in place --------------------------------------------------------------------------------------------


def _modules() -> Mapping[str, ModuleType]:
    """The stand-in's modules by name."""

    def module(name: str, **contents: Any) -> ModuleType:
        made = ModuleType(name)
        vars(made).update(contents)
        return made

    recipe = module(
        "transformer_engine.common.recipe",
        **{kind.__name__: kind for kind in (Format, DelayedScaling, Float8CurrentScaling, Float8BlockScaling)},
    )
    fp8 = module("transformer_engine.pytorch.fp8", FP8GlobalStateManager=FP8GlobalStateManager)
    classes = (
        Linear,
        LayerNormLinear,
        GroupedLinear,
        RMSNorm,
        LayerNorm,
        DotProductAttention,
        Fp8Padding,
        Fp8Unpadding,
        *fake_float8_tensors.CLASSES,
    )
    pytorch = module(
        "transformer_engine.pytorch",
        fp8=fp8,
        autocast=autocast,
        quantized_model_init=quantized_model_init,
        **{kind.__name__: kind for kind in classes},
    )
    common = module("transformer_engine.common", recipe=recipe)
    top = module("transformer_engine", pytorch=pytorch, common=common, __version__="2.20.2")
    kernels = module("transformer_engine_torch", **_kernels())
    return {made.__name__: made for made in (top, common, recipe, pytorch, fp8, kernels)}


_OURS = (
    "transformer_engine_layers",
    "transformer_engine_activation",
    "transformer_engine_attention",
    "transformer_engine_mlp",
    "transformer_engine_recipes",
    "transformer_engine_weights",
)


def _forget_ours() -> None:
    """Have the framework's own file import the package anew."""
    extensions: Any = sys.modules["megatron.core.extensions"]
    extensions.why_missing.cache_clear()
    import_paths.find_name.cache_clear()
    for name in _OURS:
        sys.modules.pop(f"megatron.core.extensions.{name}", None)
        vars(extensions).pop(name, None)


def install() -> None:
    """Let this process, a rank that ends with its test, find the stand-in in place of the package."""
    import megatron.core.extensions  # noqa: F401

    sys.modules.update(_modules())
    gpt_config.DEVICES_OF_TRANSFORMER_ENGINE = ("cuda", "cpu")
    FP8GlobalStateManager.reset()
    _forget_ours()


@contextmanager
def installed() -> Iterator[SimpleNamespace]:
    """As ``install``, in this scope."""
    import megatron.core.extensions  # noqa: F401

    before = {
        name: module
        for name, module in sys.modules.items()
        if name.split(".")[0] in ("transformer_engine", "transformer_engine_torch")
    }
    for name in before:
        del sys.modules[name]
    install()
    try:
        yield SimpleNamespace(state=FP8GlobalStateManager)
    finally:
        for name in _modules():
            sys.modules.pop(name, None)
        sys.modules.update(before)
        FP8GlobalStateManager.reset()
        gpt_config.DEVICES_OF_TRANSFORMER_ENGINE = ("cuda",)
        _forget_ours()


@pytest.fixture
def fake_transformer_engine() -> Iterator[SimpleNamespace]:
    """transformer-engine's stand-in, for one test."""
    with installed() as fake:
        yield fake

"""Stand-ins for transformer-engine's quantised tensors and quantisers: their constructors, and the attributes that we set."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.float8_weights import DequantizedWeight


class DType:
    kFloat8E4M3 = torch.float8_e4m3fn


class _Quantizer:
    rowwise_usage = columnwise_usage = True

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def copy(self) -> _Quantizer:
        return self


class Float8Quantizer(_Quantizer):
    def __init__(self, scale: torch.Tensor, amax: torch.Tensor, fp8_dtype: Any) -> None:
        self.scale, self.amax, self.dtype = scale, amax, fp8_dtype


class Float8CurrentScalingQuantizer(_Quantizer):
    def __init__(self, fp8_dtype: Any, device: torch.device, *, force_pow_2_scales: bool = False) -> None:
        self.dtype, self.force_pow_2_scales = fp8_dtype, force_pow_2_scales


class Float8BlockQuantizer(_Quantizer):
    def __init__(self, fp8_dtype: Any, *, rowwise: bool, columnwise: bool, force_pow_2_scales: bool = True) -> None:
        self.dtype, self.force_pow_2_scales = fp8_dtype, force_pow_2_scales


class QuantizedTensor(DequantizedWeight):
    __module__ = "transformer_engine.pytorch.quantized_tensor"

    """Refuses all operations but those of ``_Gemm``, which asks for values."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.Tensor.__torch_function__.__func__(cls, function, types, args, kwargs or {})  # type: ignore[attr-defined]


class Float8Tensor(QuantizedTensor):
    __module__ = "transformer_engine.pytorch.tensor.float8_tensor"

    def __new__(
        cls: Any,
        *,
        shape: Any,
        dtype: torch.dtype,
        data: torch.Tensor,
        fp8_scale_inv: torch.Tensor,
        fp8_dtype: Any,
        requires_grad: bool,
        data_transpose: torch.Tensor | None,
        quantizer: Any,
        device: torch.device,
    ) -> Float8Tensor:
        assert data.shape == shape and data.dtype == torch.uint8 and fp8_scale_inv.shape == (1,)
        made: Float8Tensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._data, made._scale_inv, made._quantizer = data, fp8_scale_inv, quantizer.copy()  # type: ignore[attr-defined]
        made._transpose, made._transpose_invalid = None, True
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function not in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            raise NotImplementedError(f"nothing but a GEMM may read these bytes, got {function}")
        own = args[0]
        return cls(
            shape=own.shape,
            dtype=own.dtype,
            data=own._data,
            fp8_scale_inv=own._scale_inv,
            fp8_dtype=DType.kFloat8E4M3,
            requires_grad=False,
            data_transpose=None,
            quantizer=own._quantizer,
            device=own.device,
        )

    @property
    def _inverse(self) -> torch.Tensor:  # type: ignore[override]
        return self._scale_inv  # type: ignore[attr-defined]

    def dequantize_transpose(self) -> torch.Tensor:
        if self._transpose_invalid:  # type: ignore[has-type]
            self._transpose, self._transpose_invalid = self._data.t().contiguous(), False
        return super().dequantize_transpose()


CLASSES = (DType, Float8Quantizer, Float8CurrentScalingQuantizer, Float8BlockQuantizer, Float8Tensor)

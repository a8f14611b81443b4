"""Stand-ins for transformer-engine's quantised tensors and quantisers: their constructors, and the attributes that we set."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.float8_weights import DequantizedWeight


class DType:
    kFloat8E4M3 = torch.float8_e4m3fn
    kFloat8E5M2 = torch.float8_e5m2


class _Quantizer:
    dtype: Any
    internal = False
    rowwise_usage = columnwise_usage = True

    def copy(self) -> Any:
        made = copy.copy(self)
        made.internal = self.internal
        return made

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def __call__(self, x: torch.Tensor) -> Any:
        return self.quantize(x.float(), x.dtype)

    def scale_for(self, x: torch.Tensor) -> torch.Tensor:
        largest, amax = torch.finfo(self.dtype).max, x.abs().amax().view(1)
        return torch.where(amax > 0, torch.full_like(amax, largest).div(amax), torch.ones_like(amax))

    def quantize(self, x: torch.Tensor, nominal: torch.dtype) -> Any:
        """Round x [..., columns], fp32, to what the usages ask for; the transposed bytes are [columns, ...]."""
        largest, scale = torch.finfo(self.dtype).max, self.scale_for(x)
        data = (x * scale).clamp(-largest, largest).to(self.dtype).view(torch.uint8)
        transpose = data.movedim(-1, 0).contiguous() if self.columnwise_usage else None
        return self.wrap(data, transpose, scale.reciprocal(), nominal)

    def wrap(self, data: torch.Tensor, transpose: Any, inverse: torch.Tensor, nominal: torch.dtype) -> Any:
        if self.internal:
            return SimpleNamespace(
                _data=data,
                _transpose=transpose,
                _transpose_invalid=transpose is None,
                _scale_inv=inverse,
                _fp8_dtype=self.dtype,
                _quantizer=self.copy(),
            )
        return Float8Tensor(
            shape=data.shape,
            dtype=nominal,
            data=data,
            fp8_scale_inv=inverse,
            fp8_dtype=self.dtype,
            requires_grad=False,
            data_transpose=transpose,
            quantizer=self,
            device=data.device,
        )


class Float8Quantizer(_Quantizer):
    on_use: Any = None

    def __init__(self, scale: torch.Tensor, amax: torch.Tensor, fp8_dtype: Any) -> None:
        self.scale, self.amax, self.dtype = scale, amax, fp8_dtype

    def scale_for(self, x: torch.Tensor) -> torch.Tensor:
        self.amax.copy_(torch.maximum(self.amax, x.abs().amax()))
        if self.on_use is not None:
            self.on_use()
        return self.scale.clone()


class Float8CurrentScalingQuantizer(_Quantizer):
    def __init__(self, fp8_dtype: Any, device: torch.device, *, force_pow_2_scales: bool = False) -> None:
        self.dtype, self.force_pow_2_scales = fp8_dtype, force_pow_2_scales


class Float8BlockQuantizer(_Quantizer):
    """One block, which is the whole tensor."""

    def __init__(self, fp8_dtype: Any, *, rowwise: bool, columnwise: bool, force_pow_2_scales: bool = True) -> None:
        self.dtype, self.force_pow_2_scales = fp8_dtype, force_pow_2_scales

    def wrap(self, data: torch.Tensor, transpose: Any, inverse: torch.Tensor, nominal: torch.dtype) -> Any:
        columns = None if transpose is None else inverse
        if self.internal:
            return SimpleNamespace(
                _rowwise_data=data,
                _rowwise_scale_inv=inverse,
                _columnwise_data=transpose,
                _columnwise_scale_inv=columns,
            )
        return Float8BlockwiseQTensor(
            shape=data.shape,
            dtype=nominal,
            rowwise_data=data,
            rowwise_scale_inv=inverse,
            columnwise_data=transpose,
            columnwise_scale_inv=columns,
            fp8_dtype=self.dtype,
            quantizer=self,
            is_2D_scaled=False,
            requires_grad=False,
            device=data.device,
        )


class QuantizedTensor(DequantizedWeight):
    __module__ = "transformer_engine.pytorch.quantized_tensor"

    """Refuses all operations but those of ``_Gemm``, which asks for values."""

    _fp8_dtype: Any

    def dequantize_columns(self) -> torch.Tensor:
        """The values, from the transposed bytes."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.isnan:  # the engine asks whether a weight has values
            return args[0].dequantize().isnan()
        return torch.Tensor.__torch_function__.__func__(cls, function, types, args, kwargs or {})  # type: ignore[attr-defined]


class Float8Tensor(QuantizedTensor):
    __module__ = "transformer_engine.pytorch.tensor.float8_tensor"
    _data: Any
    _scale_inv: Any
    _quantizer: Any
    _transpose: Any
    _transpose_invalid: bool

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
        made._data, made._scale_inv, made._quantizer = data, fp8_scale_inv, quantizer.copy()
        made._transpose, made._transpose_invalid, made._fp8_dtype = data_transpose, data_transpose is None, fp8_dtype
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        own = args[0]
        if function not in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            raise NotImplementedError(f"nothing but a GEMM may read these bytes, got {function}")
        return own._of(own._data, own.shape)

    def _of(self, data: Any, shape: torch.Size) -> Float8Tensor:
        """Return a tensor of these bytes with this one's scale, without transposed bytes."""
        return Float8Tensor(
            shape=shape,
            dtype=self.dtype,
            data=data,
            fp8_scale_inv=self._scale_inv,
            fp8_dtype=self._fp8_dtype,
            requires_grad=False,
            data_transpose=None,
            quantizer=self._quantizer,
            device=self.device,
        )

    @property
    def _inverse(self) -> torch.Tensor:  # type: ignore[override]
        return self._scale_inv

    def reshape(self, *shape: Any) -> Any:
        """Drop the transposed bytes, as the real class does with more than two dims."""
        data = self._data.reshape(*shape)
        return self._of(data, data.shape)

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        if columnwise_usage and self._transpose_invalid:
            assert self._data is not None, "FP8 data is required to generate FP8 data transpose"
            COUNTS["transposes"] += 1
            self._transpose, self._transpose_invalid = self._data.movedim(-1, 0).contiguous(), False
        if rowwise_usage is False:
            self._data = None
        if columnwise_usage is False:
            self._transpose, self._transpose_invalid = None, True

    def dequantize(self) -> torch.Tensor:
        return self._read(self._data)

    def dequantize_columns(self) -> torch.Tensor:
        self.update_usage(columnwise_usage=True)
        assert self._transpose is not None
        return self._read(self._transpose.movedim(0, -1))

    def _read(self, data: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = (data.view(self._fp8_dtype).float() * self._scale_inv).to(self.dtype)
        return values

    def dequantize_transpose(self) -> torch.Tensor:
        if self._transpose_invalid:
            self._transpose, self._transpose_invalid = self._data.t().contiguous(), False
        return super().dequantize_transpose()


class Float8BlockwiseQTensor(QuantizedTensor):
    __module__ = "transformer_engine.pytorch.tensor.float8_blockwise_tensor"
    _rowwise_data: Any
    _rowwise_scale_inv: Any
    _columnwise_data: Any
    _columnwise_scale_inv: Any
    _quantizer: Any

    def __new__(
        cls: Any,
        *,
        shape: Any,
        dtype: torch.dtype,
        rowwise_data: Any,
        rowwise_scale_inv: Any,
        columnwise_data: Any,
        columnwise_scale_inv: Any,
        fp8_dtype: Any,
        quantizer: Any,
        is_2D_scaled: bool,
        requires_grad: bool,
        device: torch.device,
    ) -> Float8BlockwiseQTensor:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._rowwise_data, made._rowwise_scale_inv, made._fp8_dtype = rowwise_data, rowwise_scale_inv, fp8_dtype
        made._columnwise_data, made._columnwise_scale_inv = columnwise_data, columnwise_scale_inv
        made._quantizer = quantizer
        blockwise: Float8BlockwiseQTensor = made
        return blockwise

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        assert function is torch.ops.aten.detach.default, function
        own = args[0]
        return cls(
            shape=own.shape,
            dtype=own.dtype,
            rowwise_data=own._rowwise_data,
            rowwise_scale_inv=own._rowwise_scale_inv,
            columnwise_data=own._columnwise_data,
            columnwise_scale_inv=own._columnwise_scale_inv,
            fp8_dtype=own._fp8_dtype,
            quantizer=own._quantizer,
            is_2D_scaled=False,
            requires_grad=False,
            device=own.device,
        )

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        assert not columnwise_usage or self._columnwise_data is not None, "columns have scales of their own"
        if rowwise_usage is False:
            self._rowwise_data, self._rowwise_scale_inv = None, None

    def dequantize(self) -> torch.Tensor:
        return self._read(self._rowwise_data, self._rowwise_scale_inv)

    def dequantize_columns(self) -> torch.Tensor:
        self.update_usage(columnwise_usage=True)
        return self._read(self._columnwise_data.movedim(0, -1), self._columnwise_scale_inv)

    def _read(self, data: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = (data.view(self._fp8_dtype).float() * inverse).to(self.dtype)
        return values


COUNTS = {"transposes": 0}
"""How often ``Float8Tensor`` made transposed bytes that its quantiser had not written."""

CLASSES = (
    DType,
    Float8Quantizer,
    Float8CurrentScalingQuantizer,
    Float8BlockQuantizer,
    Float8Tensor,
    Float8BlockwiseQTensor,
)

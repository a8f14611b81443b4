"""Activations that are written in FP8, and so are their gradients. Importing this file without the package raises ImportError.

Shapes: s sequence, b batch, f MLP width; the input of a gated activation is [gate; up], 2f wide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from megatron.core.activations import squared_relu
from megatron.core.extensions.transformer_engine_layers import te, tex
from megatron.core.fusions.float8_launch import gated_backward_in_fp8, gated_in_fp8, kept_values, kernels_work
from megatron.core.jit import is_compiled

_DTYPES = {te.DType.kFloat8E4M3: torch.float8_e4m3fn, te.DType.kFloat8E5M2: torch.float8_e5m2}


class _Kernels(NamedTuple):
    """transformer-engine's kernels, which write what the quantiser says, and the name of ours in ``float8_launch``."""

    forward: Callable[[torch.Tensor, Any], Any]
    backward: Callable[[torch.Tensor, torch.Tensor, Any], Any]
    ours: str | None = None


_KERNELS: dict[tuple[Any, bool], _Kernels] = {
    (F.silu, True): _Kernels(tex.swiglu, tex.dswiglu, "silu"),
    (F.gelu, True): _Kernels(tex.geglu, tex.dgeglu, "gelu"),
    (F.relu, True): _Kernels(tex.reglu, tex.dreglu),
    (squared_relu, True): _Kernels(tex.sreglu, tex.dsreglu),
    (F.silu, False): _Kernels(tex.silu, tex.dsilu),
    (F.gelu, False): _Kernels(tex.gelu, tex.dgelu),
    (F.relu, False): _Kernels(tex.relu, tex.drelu),
    (squared_relu, False): _Kernels(tex.srelu, tex.dsrelu),
}
"""By function and whether it is of a gate; GELU is the tanh form."""


class Fp8Activation:
    """An activation whose result is written in FP8, and its gradient if that is asked for.

    Where the scale is known before, gated ones are kernels of ours: transformer-engine's read, on Hopper, what they have
    written once more for the transposed bytes.

    Args:
        gated: the input is [gate; up].
        ours: whether our kernels may be taken.
        keeps_in_fp8: keep the input in FP8 for backward.
    """

    def __init__(self, function: Any, *, gated: bool, ours: bool, keeps_in_fp8: bool) -> None:
        kernels = _KERNELS[function, gated]
        self._kernels = kernels if ours else kernels._replace(ours=None)
        self._keeps_in_fp8 = keeps_in_fp8

    def __call__(self, x: torch.Tensor, quantizer: Any, quantizer_of_gradient: Any) -> Any:
        """Activate x [s, b, f or 2f] to a tensor [s, b, f] of transformer-engine's class; its gradient may be one, too.

        Args:
            quantizer_of_gradient: None: the gradient of x is in the dtype of x.
        """
        return _Apply.apply(x, self, quantizer, quantizer_of_gradient)

    def writes_either(self, x: torch.Tensor, quantizer: Any) -> bool:
        """Return whether transposed bytes can be written alone."""
        ours = self._kernels.ours
        if ours is None or not isinstance(quantizer, te.Float8Quantizer) or not is_compiled(True, x):
            return False
        return kernels_work(ours, x.device)

    def write(self, x: torch.Tensor, quantizer: Any) -> Any:
        """Return an object with the bytes and scales of the activated x."""
        return self.write_and_keep(x, quantizer, keeps_in_fp8=False)[0]

    def write_and_keep(
        self, x: torch.Tensor, quantizer: Any, *, keeps_in_fp8: bool | None = None
    ) -> tuple[Any, tuple[Any, ...]]:
        """Return that and what backward needs."""
        keeps = self._keeps_in_fp8 if keeps_in_fp8 is None else keeps_in_fp8
        if not self.writes_either(x, quantizer):
            return self._kernels.forward(x, quantizer), (_quantized(x),) if keeps else (x,)
        settings = _settings(self._kernels, quantizer)
        written = gated_in_fp8(x, rows=quantizer.rowwise_usage, keeps_input=keeps, **settings)
        return _Written(written.data, written.transposed, quantizer), written.kept or (x,)

    def backward(self, grad: torch.Tensor, kept: tuple[Any, ...], quantizer: Any) -> Any:
        """Return the gradient of x [s, b, f or 2f], or an object with its bytes and scale."""
        if quantizer is not None and self.writes_either(grad, quantizer):
            written = gated_backward_in_fp8(grad, *kept, **_settings(self._kernels, quantizer))
            return _Written(written.data, written.transposed, quantizer)
        return self._kernels.backward(grad, _values(*kept, dtype=grad.dtype), quantizer)


def _settings(kernels: _Kernels, quantizer: Any) -> dict[str, Any]:
    return {
        "activation": kernels.ours,
        "dtype": _DTYPES[quantizer.dtype],
        "scale": quantizer.scale,
        "amax": quantizer.amax,
        "columns": quantizer.columnwise_usage,
    }


def _quantized(x: torch.Tensor) -> Any:
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, x.device)
    quantizer.set_usage(rowwise=True, columnwise=False)
    return quantizer(x)


def _values(kept: Any, inverse: torch.Tensor | None = None, *, dtype: torch.dtype) -> torch.Tensor:
    """Return the input, of what was kept of it."""
    if inverse is not None:
        return kept_values(kept, inverse, dtype)
    values: torch.Tensor = kept.dequantize() if isinstance(kept, te.Float8Tensor) else kept
    return values


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, activation: Fp8Activation, quantizer: Any, quantizer_of_gradient: Any
    ) -> Any:
        activated, kept = activation.write_and_keep(x, quantizer)
        ctx.save_for_backward(*kept)
        ctx.activation, ctx.quantizer = activation, quantizer_of_gradient
        if isinstance(activated, _Written):
            return te.Float8Tensor(**_fields(activated, activated._data, activated._transpose, x))
        return activated

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[Any, ...]:
        (grad,) = grad_outputs
        gradient = ctx.activation.backward(grad, ctx.saved_tensors, ctx.quantizer)
        return (gradient if ctx.quantizer is None else _Gradient.of(gradient, grad)), None, None, None


class _Written:
    """What our kernels have written, with the attributes of transformer-engine's storages."""

    __slots__ = ("_data", "_fp8_dtype", "_quantizer", "_scale_inv", "_transpose", "_transpose_invalid")

    def __init__(self, data: torch.Tensor | None, transpose: torch.Tensor | None, quantizer: Any) -> None:
        self._data, self._transpose, self._transpose_invalid = data, transpose, transpose is None
        self._quantizer, self._fp8_dtype = quantizer, quantizer.dtype
        self._scale_inv = quantizer.scale.reciprocal().view(1)


class _Gradient(te.Float8Tensor):  # type: ignore[misc, unused-ignore]
    """A gradient whose transposed bytes stay when it is seen as a matrix.

    The linear layer does this first, and transformer-engine's own tensors (2.20) drop those bytes then, unless they were made
    of two dims. To be deleted when they keep them.
    """

    @classmethod
    def of(cls, quantized: Any, like: torch.Tensor) -> _Gradient:
        made: _Gradient = cls(**_fields(quantized, quantized._data, quantized._transpose, like))
        return made

    def reshape(self, *shape: Any) -> Any:
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        width = self._data.shape[-1]
        if sizes != (-1, width):
            return super().reshape(*sizes)
        transpose = None if self._transpose is None else self._transpose.view(width, -1)
        return te.Float8Tensor(**_fields(self, self._data.view(sizes), transpose, self))


def _fields(quantized: Any, data: Any, transpose: torch.Tensor | None, like: torch.Tensor) -> dict[str, Any]:
    """Return a Float8Tensor's arguments, with the scale of ``quantized``."""
    return {
        "shape": data.shape,
        "dtype": like.dtype,
        "data": data,
        "data_transpose": transpose,
        "fp8_scale_inv": quantized._scale_inv,
        "fp8_dtype": quantized._fp8_dtype,
        "requires_grad": False,
        "quantizer": quantized._quantizer,
        "device": like.device,
    }

"""The MLP of transformer-engine's layers, with its activation in FP8. Importing this file without the package raises ImportError.

Norm and first linear layer are one module already, so what is left to fuse is the activation: it writes what the second layer
multiplies, and its backward the gradient that the first one multiplies, both with their transposed bytes. transformer-engine's
own ``ops.Sequential`` does this too. It is not used, because it would keep each weight in FP8 from forward to backward, and
keep histories and scales apart from the linear layers', where checkpoints and the sharding engine look for them.

Shapes: s sequence, b batch, h hidden size, f MLP width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from megatron.core.activations import squared_relu
from megatron.core.extensions.transformer_engine import FP8GlobalStateManager, te, tex
from megatron.core.fusions.float8_launch import gated_backward_in_fp8, gated_in_fp8
from megatron.core.jit import is_compiled
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.recomputation import call_before_backward_of

__all__ = ["TEFusedMLP"]


class _Kernels(NamedTuple):
    """transformer-engine's kernels of an activation, which write what the quantiser says, and ours."""

    forward: Callable[[torch.Tensor, Any], Any]
    """([s, b, f or 2f], quantiser) -> [s, b, f]."""
    backward: Callable[[torch.Tensor, torch.Tensor, Any], Any]
    """(gradient [s, b, f], input, quantiser) -> gradient of the input."""
    ours: str | None = None
    """The name of a gated activation in ``float8_launch``. On Hopper transformer-engine reads what it has written once more
    for the transposed bytes."""


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

_DTYPES = {te.DType.kFloat8E4M3: torch.float8_e4m3fn, te.DType.kFloat8E5M2: torch.float8_e5m2}
_BYTES = ("_data", "_scale_inv", "_transpose", "_transpose_invalid")
_BYTES_OF_BLOCKS = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")


class TEFusedMLP(MLP):
    """An MLP that, in FP8, never has its activation in memory in bf16, and with one scale a tensor nor its gradient.

    Parameters, histories and checkpoints are those of ``MLP``. Outside of FP8 it computes as that. With a bias of fc1 the
    gradient is in bf16, since the bias's is the sum of it.

    Source: Megatron-Core's class of this name.
    """

    activates_with_bias = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.config.use_transformer_engine_op_fuser:
            raise ValueError(
                "TransformerConfig.use_transformer_engine_op_fuser must be on with TEFusedMLP, got it off: it says which"
                " activations transformer-engine can compute; turn it on, or leave use_te_op_fuser out of the layer spec"
            )
        kernels = _KERNELS[self.activation_func, self.config.gated_linear_unit]
        self._kernels = kernels._replace(ours=None) if self.config.disable_jit_fuser else kernels
        self._own: dict[str, tuple[Any, Any]] = {}

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As ``MLP.forward``."""
        if not FP8GlobalStateManager.is_fp8_enabled():
            return super().forward(hidden_states)
        intermediate, _ = self.linear_fc1(hidden_states)
        # Its quantisers must be there before it runs.
        self.linear_fc2.init_fp8_metadata()
        quantizer = self._quantizer("scaling_fwd")
        keeps = torch.is_grad_enabled() and intermediate.requires_grad and self.linear_fc2.weight.requires_grad
        recomputes = keeps and self.recomputes_activation
        quantizer.set_usage(rowwise=True, columnwise=keeps and not recomputes)
        again = self._again(quantizer) if recomputes else None  # with the scale of now
        activated = _Activate.apply(intermediate, self._kernels, quantizer, self._quantizer_of_gradient())
        output, output_bias = self.linear_fc2(activated)
        if again is not None:
            self._release(activated, intermediate.detach(), again, output)
        elif keeps:
            # As transformer-engine does with what it quantised itself: backward multiplies the transposed bytes alone.
            activated.update_usage(rowwise_usage=False, columnwise_usage=True)
        return output, output_bias

    def _quantizer(self, direction: str) -> Any:
        """Return a quantiser with the scale and the history of fc2's input, or of the gradient of fc1's output."""
        forward = direction == "scaling_fwd"
        theirs = (self.linear_fc2 if forward else self.linear_fc1).quantizers[direction][0]
        found = self._own.get(direction)
        if found is None or found[0] is not theirs:
            ours = theirs.copy()
            # Internal ones make plain objects instead of tensors, and autograd must see that of forward.
            ours.internal = not forward
            found = self._own[direction] = (theirs, ours)
        return found[1]

    def _quantizer_of_gradient(self) -> Any:
        quantizer = self._quantizer("scaling_bwd")
        if self.linear_fc1.apply_bias or isinstance(quantizer, te.Float8BlockQuantizer):
            return None
        quantizer.set_usage(rowwise=True, columnwise=self.linear_fc1.weight.requires_grad)
        return quantizer

    def _again(self, quantizer: Any) -> Any:
        """Return a quantiser that gives the same bytes in backward, when scales have moved, and leaves the history alone."""
        if not isinstance(quantizer, te.Float8Quantizer):
            again = quantizer.copy()
        else:
            scale, unread = quantizer.scale.clone(), torch.empty_like(quantizer.amax)
            again = te.Float8Quantizer(scale=scale, amax=unread, fp8_dtype=quantizer.dtype)
        again.internal = True
        return again

    def _release(self, activated: Any, intermediate: torch.Tensor, again: Any, output: torch.Tensor) -> None:
        """Drop the bytes of what is activated until backward; fc2 keeps the object that holds them."""
        names = _BYTES_OF_BLOCKS if isinstance(activated, te.Float8BlockwiseQTensor) else _BYTES
        for name in names:
            setattr(activated, name, None)

        def refill() -> None:
            # transformer-engine's kernels make the transposed bytes of the others.
            again.set_usage(rowwise=not _is_ours(self._kernels, intermediate, again), columnwise=True)
            fresh = _write_activated(self._kernels, intermediate, again)
            for name in names:
                setattr(activated, name, getattr(fresh, name))
            activated.update_usage(rowwise_usage=False, columnwise_usage=True)

        call_before_backward_of(output, refill)


class _Activate(torch.autograd.Function):
    """The activation [s, b, f or 2f] -> [s, b, f], in FP8; keeps its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kernels: _Kernels, quantizer: Any, quantizer_of_gradient: Any) -> Any:
        ctx.save_for_backward(x)
        ctx.kernels, ctx.quantizer = kernels, quantizer_of_gradient
        activated = _write_activated(kernels, x, quantizer)
        if isinstance(activated, _Written):
            return te.Float8Tensor(**_fields(activated, activated._data, activated._transpose, x))
        return activated

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[Any, ...]:
        (grad,), (x,) = grad_outputs, ctx.saved_tensors
        if ctx.quantizer is None:
            return ctx.kernels.backward(grad, x, None), None, None, None
        return _Gradient.of(_write_gradient(ctx.kernels, grad, x, ctx.quantizer), x), None, None, None


@dataclass(slots=True)
class _Written:
    """What our kernels have written, with the attributes of transformer-engine's storages."""

    _data: torch.Tensor | None
    _transpose: torch.Tensor | None
    _quantizer: Any
    _scale_inv: torch.Tensor = field(init=False)
    _fp8_dtype: Any = field(init=False)
    _transpose_invalid: bool = field(init=False)

    def __post_init__(self) -> None:
        self._scale_inv = self._quantizer.scale.reciprocal().view(1)
        self._fp8_dtype, self._transpose_invalid = self._quantizer.dtype, self._transpose is None


def _is_ours(kernels: _Kernels, x: torch.Tensor, quantizer: Any) -> bool:
    return kernels.ours is not None and isinstance(quantizer, te.Float8Quantizer) and is_compiled(True, x)


def _settings(kernels: _Kernels, quantizer: Any) -> dict[str, Any]:
    return {
        "activation": kernels.ours,
        "dtype": _DTYPES[quantizer.dtype],
        "scale": quantizer.scale,
        "amax": quantizer.amax,
        "columns": quantizer.columnwise_usage,
    }


def _write_activated(kernels: _Kernels, x: torch.Tensor, quantizer: Any) -> Any:
    """Compute the activation in FP8."""
    if not _is_ours(kernels, x, quantizer):
        return kernels.forward(x, quantizer)
    written = gated_in_fp8(x, rows=quantizer.rowwise_usage, **_settings(kernels, quantizer))
    return _Written(*written, _quantizer=quantizer)


def _write_gradient(kernels: _Kernels, grad: torch.Tensor, x: torch.Tensor, quantizer: Any) -> Any:
    """Compute the gradient of the activation's input in FP8."""
    if not _is_ours(kernels, x, quantizer):
        return kernels.backward(grad, x, quantizer)
    return _Written(*gated_backward_in_fp8(grad, x, **_settings(kernels, quantizer)), _quantizer=quantizer)


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

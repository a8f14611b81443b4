"""The MLP of transformer-engine's layers, with its activation in FP8. Importing this file without the package raises ImportError.

Norm and first linear layer are one module already, so what is left to fuse is the activation: it writes what the second layer
multiplies, and its backward the gradient that the first one multiplies, both with their transposed bytes. transformer-engine's
own ``ops.Sequential`` does this too. It is not used, because it would keep each weight in FP8 from forward to backward, and
keep histories and scales apart from the linear layers', where checkpoints and the sharding engine look for them.

Shapes: s sequence, b batch, h hidden size, f MLP width.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.extensions.transformer_engine_activation import Fp8Activation
from megatron.core.extensions.transformer_engine_layers import FP8GlobalStateManager, te
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.recomputation import call_before_backward_of

__all__ = ["TEFusedMLP"]

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
        self._activation = Fp8Activation(
            self.activation_func,
            gated=self.config.gated_linear_unit,
            ours=not self.config.disable_jit_fuser,
            keeps_in_fp8=self.config.activation_func_fp8_input_store,
        )
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
        activated = self._activation(intermediate, quantizer, self._quantizer_of_gradient())
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
            again.set_usage(rowwise=not self._activation.writes_either(intermediate, again), columnwise=True)
            fresh = self._activation.write(intermediate, again)
            for name in names:
                setattr(activated, name, getattr(fresh, name))
            activated.update_usage(rowwise_usage=False, columnwise_usage=True)

        call_before_backward_of(output, refill)

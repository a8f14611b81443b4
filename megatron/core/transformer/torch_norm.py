"""LayerNorm and RMSNorm: statistics in fp32, the result in the dtype of the weight.

Shapes: s sequence, b batch, h the normalised size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from megatron.core.transformer.parameter_init import ConstantInit, InitializedParameters

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class _Norm(InitializedParameters):
    """The weight, stored as its distance from 1 where ``config.layernorm_zero_centered_gamma`` is set."""

    weight: torch.Tensor

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(config)
        self.hidden_size, self.eps = hidden_size, eps
        self.add_parameter("weight", (hidden_size,), ConstantInit(0.0 if config.layernorm_zero_centered_gamma else 1.0))

    def _scale(self) -> torch.Tensor:
        return self.weight + 1 if self.config.layernorm_zero_centered_gamma else self.weight

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"


class RMSNorm(_Norm):
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)
        self.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., h] in any float dtype -> [..., h] in the dtype of the weight."""
        scale = self._scale()
        if x.dtype == scale.dtype:
            return F.rms_norm(x, (self.hidden_size,), scale, self.eps)
        return F.rms_norm(x.float(), (self.hidden_size,), scale.float(), self.eps).to(scale.dtype)


class LayerNorm(_Norm):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias."""

    bias: torch.Tensor

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)
        self.add_parameter("bias", (hidden_size,), ConstantInit(0.0))
        self.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., h] in any float dtype -> [..., h] in the dtype of the weight."""
        scale = self._scale()
        if x.dtype == scale.dtype:
            return F.layer_norm(x, (self.hidden_size,), scale, self.bias, self.eps)
        normed = F.layer_norm(x.float(), (self.hidden_size,), scale.float(), self.bias.float(), self.eps)
        return normed.to(scale.dtype)


class WrappedTorchNorm:
    """Builds the norm that ``config.normalization`` names (the name that Megatron-Core's layer specs use)."""

    def __new__(  # type: ignore[misc]
        cls,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        normalization: str | None = None,
    ) -> RMSNorm | LayerNorm:
        """Args: ``normalization`` is what the layer spec was asked for; None follows the configuration.

        Raises:
            ValueError: the layer spec asks for another norm than the configuration.
        """
        if normalization is not None and normalization != config.normalization:
            raise ValueError(
                f"the layer spec and TransformerConfig must name the same normalization, got {normalization!r} in the"
                f" spec and {config.normalization!r} in the config; pass the same value to both"
            )
        return (RMSNorm if config.normalization == "RMSNorm" else LayerNorm)(config, hidden_size, eps)

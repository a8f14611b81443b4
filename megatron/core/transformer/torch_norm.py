"""LayerNorm and RMSNorm: statistics in fp32, the result in the dtype of the weight.

Shapes: s sequence, b batch, h the normalised size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from megatron.core.fusions.fused_norm import fused_norm
from megatron.core.transformer.init_methods import ConstantInit
from megatron.core.transformer.parameter_init import InitializedParameters

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class Norm(InitializedParameters):
    """Base class of the norms; weights are stored as weight - 1 with ``config.layernorm_zero_centered_gamma``."""

    weight: torch.Tensor
    centered: bool
    """Whether the mean is subtracted first."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(config)
        self.hidden_size, self.eps = hidden_size, eps
        self._add("weight", 0.0 if config.layernorm_zero_centered_gamma else 1.0)

    def _add(self, name: str, value: float) -> None:
        # With sequence parallelism a norm sees this rank's part of the sequence, so gradients are partial sums.
        marks: dict[str, Any] = {"sequence_parallel": True} if self.config.sequence_parallel else {}
        self.add_parameter(name, (self.hidden_size,), ConstantInit(value), **marks)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None, *, keep_input: bool = False) -> Any:
        """Normalise [..., h] of any float dtype to [..., h] in the dtype of the weight.

        Args:
            residual: [..., h] added to x first.
            keep_input: return (norm, x + residual). With ``config.persist_layer_norm`` the norm's backward kernel then
                adds the gradients of both.
        """
        scale = self._scale()
        if self.config.persist_layer_norm:
            compiled = not self.config.disable_jit_fuser
            pair = fused_norm(
                x, residual, scale, self._shift(), eps=self.eps, centered=self.centered, compiled=compiled
            )
            return pair if keep_input else pair[0]
        if residual is not None:
            x = residual + x
        return (self._plain(x, scale), x) if keep_input else self._plain(x, scale)

    def _shift(self) -> torch.Tensor | None:
        return None

    def _plain(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Normalise by PyTorch's own kernel."""
        raise NotImplementedError

    def _scale(self) -> torch.Tensor:
        return self.weight + 1 if self.config.layernorm_zero_centered_gamma else self.weight

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"


class RMSNorm(Norm):
    """RMSNorm: x / sqrt(mean(x^2) + eps) * weight."""

    centered = False

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)
        self.reset_parameters()

    def _plain(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if x.dtype == scale.dtype:
            return F.rms_norm(x, (self.hidden_size,), scale, self.eps)
        return F.rms_norm(x.float(), (self.hidden_size,), scale.float(), self.eps).to(scale.dtype)


class LayerNorm(Norm):
    """LayerNorm: (x - mean(x)) / sqrt(var(x) + eps) * weight + bias."""

    bias: torch.Tensor
    centered = True

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)
        self._add("bias", 0.0)
        self.reset_parameters()

    def _shift(self) -> torch.Tensor:
        return self.bias

    def _plain(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if x.dtype == scale.dtype:
            return F.layer_norm(x, (self.hidden_size,), scale, self.bias, self.eps)
        normed = F.layer_norm(x.float(), (self.hidden_size,), scale.float(), self.bias.float(), self.eps)
        return normed.to(scale.dtype)


class L2Norm(torch.nn.Module):
    """RMSNorm without a weight: x / sqrt(mean(x^2) + eps), in fp32 and back to the dtype of x.

    Args:
        kwargs: what the constructors of the other norms get; without effect.

    Source: Megatron-Core's class of this name, for the queries and keys of Llama 4.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [..., h]."""
        return F.rms_norm(x.float(), (self.hidden_size,), None, self.eps).to(x.dtype)


class WrappedTorchNorm:
    """A constructor of the norm that ``config.normalization`` names; Megatron-Core's layer specs use this name."""

    def __new__(  # type: ignore[misc]
        cls,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        normalization: str | None = None,
    ) -> RMSNorm | LayerNorm:
        """Build the configured norm.

        Args:
            normalization: the layer spec's norm; None: that of the configuration.

        Raises:
            ValueError: the layer spec asks for another norm than the configuration.
        """
        if normalization is not None and normalization != config.normalization:
            raise ValueError(
                f"the layer spec and TransformerConfig must name the same normalization, got {normalization!r} in the"
                f" spec and {config.normalization!r} in the config; pass the same value to both"
            )
        return (RMSNorm if config.normalization == "RMSNorm" else LayerNorm)(config, hidden_size, eps)

"""The end of a sublayer: residual + dropout(x + bias), in Megatron-Core's order of operations.

Shapes: s sequence, b batch, h hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

BiasDropoutAdd = Callable[[tuple[torch.Tensor, torch.Tensor | None], torch.Tensor, float], torch.Tensor]


def get_bias_dropout_add(training: bool, fused: bool) -> BiasDropoutAdd:
    """The function that adds (x [s, b, h], bias [h] or None) to a residual [s, b, h] after dropout.

    Args:
        fused: on or off, it is the same function.
    """
    return _bias_dropout_add_train if training else _bias_dropout_add_inference


def _bias_dropout_add_train(
    x_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, prob: float
) -> torch.Tensor:
    return _bias_dropout_add(x_with_bias, residual, prob, True)


def _bias_dropout_add_inference(
    x_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, prob: float
) -> torch.Tensor:
    return _bias_dropout_add(x_with_bias, residual, prob, False)


def _bias_dropout_add(
    x_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, prob: float, training: bool
) -> torch.Tensor:
    x, bias = x_with_bias
    if bias is not None:
        x = x + bias
    # An fp32 residual (config.fp32_residual_connection) stays fp32: the sum takes the wider dtype.
    return residual + F.dropout(x, p=prob, training=training)

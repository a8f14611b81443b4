"""Attention sinks: one more score for each head, which takes a part of the probabilities and gives no value.

softmax([scores, sink]) without its last column is the plain softmax times sigmoid(logsumexp(scores) - sink). So any kernel that
returns the log-sum-exp serves, and backward is FlashAttention's with the sink in the log-sum-exp.

Shapes: b batch, n query heads, q queries, d head width.
Source: gpt-oss's sinks (arXiv:2309.17453 for the idea); Megatron-Core's ``softmax_type``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.core.process_groups_config import group_of
from megatron.core.transformer.attention_kernels import Attended
from megatron.core.transformer.parameter_init import SeededParameters

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

_NAME = "softmax_offset"


class AttentionSinks(SeededParameters):
    """The sinks of a core attention: learned ones are its parameter ``softmax_offset`` [n], split as the heads are.

    A class to inherit from before a subclass of ``torch.nn.Module``.
    """

    softmax_offset: Tensor

    def add_sinks(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None) -> None:
        """Make the parameter where ``config.softmax_type`` is "learnable"; call it once, last in the constructor."""
        assert isinstance(self, torch.nn.Module) and config.init_method is not None
        self.begin_parameters(config)
        if config.softmax_type != "learnable":
            return
        shape = self.describe_parameter(
            _NAME,
            (config.num_attention_heads,),
            config.init_method,
            partition_dim=0,
            group=group_of(pg_collection, "tp"),
        )
        self.register_parameter(_NAME, torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype)))
        self.reset_parameters()

    def sinks(self, query: Tensor) -> Tensor | None:
        """Return the sinks [n] of query [s, b, n, d]: learned, zeros ("off-by-one"), or None."""
        kind = self.config.softmax_type
        if kind == "off-by-one":
            return query.new_zeros(query.shape[2])
        return self.softmax_offset if kind == "learnable" else None


def with_sinks(attended: Attended, sinks: Tensor) -> Attended:
    """Return the result of attention with sinks [n] from the result without: output [b, n, q, d], logsumexp [b, n, q]."""
    output, logsumexp, state = attended
    total = torch.logaddexp(logsumexp, sinks.float()[None, :, None])
    weight = (logsumexp - total).exp_().unsqueeze(-1)
    return Attended((output * weight).to(output.dtype), total, state)


def gradient_of_sinks(rows: Attended, grad: Tensor, sinks: Tensor) -> Tensor:
    """Compute the gradient [n] of sinks.

    Args:
        rows: the result with sinks.
        grad: [b, n, q, d] gradient of ``rows.output``.
    """
    probs = (sinks.float()[None, :, None] - rows.logsumexp).exp()
    dot = (grad.float() * rows.output.float()).sum(-1)
    return (probs * dot).sum((0, 2)).neg().to(sinks.dtype)

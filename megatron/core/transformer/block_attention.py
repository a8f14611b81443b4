"""Attention of fixed queries over keys that arrive block by block, and its gradients.

Shapes: b batch, n query heads, g key and value heads, l queries of this rank (an early and a late chunk), k keys of a block,
d head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.transformer.attention_kernels import Attended, Block, BlockKernel, merge_block
from megatron.core.transformer.attention_sinks import gradient_of_sinks, with_sinks


def late_chunk(x: Tensor) -> Tensor:
    """Return the later of the two chunks: [b, n, l, ...] -> [b, n, l / 2, ...], a view."""
    return x[:, :, x.shape[2] // 2 :]


class BlockAttention:
    """Attention of fixed queries over the blocks added so far, accumulated in fp32.

    Args:
        query: [b, n, l, d] queries.
        key, value: [b, g, l, d] of the same tokens, the first block; it is causal.
    """

    def __init__(self, kernel: BlockKernel, query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> None:
        self.kernel, self.query, self.scale = kernel, query, scale
        output, self._logsumexp, self._state = kernel.forward(Block(query, key, value, scale, True))
        # fp32, so that the sums over blocks are not rounded to bf16 in between.
        self._output = output.float()

    def add(self, key: Tensor, value: Tensor, *, late_only: bool = False) -> None:
        """Add a block of keys and values [b, g, k, d] that all queries (or those of the late chunk alone) see."""
        query, output, logsumexp = self.query, self._output, self._logsumexp
        if late_only:
            query, output, logsumexp = late_chunk(query), late_chunk(output), late_chunk(logsumexp)
        block = self.kernel.forward(Block(query, key, value, self.scale, False))
        merge_block(output, logsumexp, block.output, block.logsumexp)

    def result(self, sinks: Tensor | None = None) -> Attended:
        """Return the result over all blocks, with sinks [n]; the output [b, n, l, d] is in the queries' dtype."""
        rows = Attended(self._output, self._logsumexp, self._state)
        if sinks is not None:
            rows = with_sinks(rows, sinks)
        return Attended(rows.output.to(self.query.dtype), rows.logsumexp, rows.state)


class BlockGradients:
    """Backward of ``BlockAttention``, block by block; sums are in fp32.

    Args:
        attended: the result of ``BlockAttention.result``.
        grad: [b, n, l, d] gradient of its output.
    """

    def __init__(self, kernel: BlockKernel, query: Tensor, attended: Attended, grad: Tensor, *, scale: float) -> None:
        self.kernel, self.query, self.attended, self.grad, self.scale = kernel, query, attended, grad, scale
        self.grad_query = torch.zeros_like(query, dtype=torch.float32)

    def add(
        self, key: Tensor, value: Tensor, *, causal: bool = False, late_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of this block's key and value [b, g, k, d]; add its part to ``grad_query``."""
        query, grad, into, (output, logsumexp, state) = self.query, self.grad, self.grad_query, self.attended
        if late_only:
            query, grad, into, output, logsumexp = map(late_chunk, (query, grad, into, output, logsumexp))
        # Kernels ignore the strides of the log-sum-exp.
        rows = Attended(output, logsumexp.contiguous(), state)
        block = Block(query, key, value, self.scale, causal)
        grad_query, grad_key, grad_value = self.kernel.backward(block, rows, grad)
        into.add_(grad_query)
        return grad_key, grad_value

    def of_sinks(self, sinks: Tensor | None) -> Tensor | None:
        """Return the gradient [n] of the sinks that ``BlockAttention.result`` was given; None where there are none."""
        return None if sinks is None else gradient_of_sinks(self.attended, self.grad, sinks)

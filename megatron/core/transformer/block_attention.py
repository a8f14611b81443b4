"""Attention of fixed queries whose keys come block by block, and its gradients.

Shapes: b batch, n query heads, g key and value heads, l queries of this rank (an early and a late chunk), k keys of a block,
d head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.transformer.attention_kernels import Attended, Block, BlockKernel, merge_block


def late_chunk(x: Tensor) -> Tensor:
    """[b, n, l, ...] -> [b, n, l / 2, ...], the later of the two chunks."""
    return x[:, :, x.shape[2] // 2 :]


class BlockAttention:
    """What queries have seen so far: the output over the blocks that were added, in fp32.

    Args:
        query: [b, n, l, d]. key, value: [b, g, l, d], those of the same tokens; each query sees itself and what is before.
    """

    def __init__(self, kernel: BlockKernel, query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> None:
        self.kernel, self.query, self.scale = kernel, query, scale
        output, self._logsumexp, self._state = kernel.forward(Block(query, key, value, scale, True))
        # With one block of keys only, the kernel's output could serve; elsewhere sums over blocks must not round to bf16.
        self._output = output.float()

    def add(self, key: Tensor, value: Tensor, *, late_only: bool = False) -> None:
        """The queries (or those of the late chunk only) have seen this block, [b, g, k, d], as a whole."""
        query, output, logsumexp = self.query, self._output, self._logsumexp
        if late_only:
            query, output, logsumexp = late_chunk(query), late_chunk(output), late_chunk(logsumexp)
        block = self.kernel.forward(Block(query, key, value, self.scale, False))
        merge_block(output, logsumexp, block.output, block.logsumexp)

    def result(self) -> Attended:
        """Of all blocks together; the output [b, n, l, d] is in the queries' dtype."""
        return Attended(self._output.to(self.query.dtype), self._logsumexp, self._state)


class BlockGradients:
    """The gradients of what ``BlockAttention`` computed, block by block; sums are in fp32.

    Args:
        attended: what ``BlockAttention.result`` gave.
        grad: [b, n, l, d] of its output.
    """

    def __init__(self, kernel: BlockKernel, query: Tensor, attended: Attended, grad: Tensor, *, scale: float) -> None:
        self.kernel, self.query, self.attended, self.grad, self.scale = kernel, query, attended, grad, scale
        self.grad_query = torch.zeros_like(query, dtype=torch.float32)

    def add(
        self, key: Tensor, value: Tensor, *, causal: bool = False, late_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The gradients of this block's key and value [b, g, k, d]; ``grad_query`` has the block's part."""
        query, grad, into, (output, logsumexp, state) = self.query, self.grad, self.grad_query, self.attended
        if late_only:
            query, grad, into, output, logsumexp = map(late_chunk, (query, grad, into, output, logsumexp))
        # A kernel reads the log-sum-exp without strides.
        rows = Attended(output, logsumexp.contiguous(), state)
        block = Block(query, key, value, self.scale, causal)
        grad_query, grad_key, grad_value = self.kernel.backward(block, rows, grad)
        into.add_(grad_query)
        return grad_key, grad_value

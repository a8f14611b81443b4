"""Attention of fixed queries whose keys come block by block, and its gradients.

Shapes: b batch, n query heads, g key and value heads, l queries of this rank (an early and a late chunk), k keys of a block,
d head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.transformer.attention_kernels import BlockKernel, merge_block


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
        output, self._logsumexp, self.state = kernel.forward(query, key, value, scale=scale, causal=True)
        # With one block of keys only, the kernel's output could serve; elsewhere sums over blocks must not round to bf16.
        self._output = output.float()

    def add(self, key: Tensor, value: Tensor, *, late_only: bool = False) -> None:
        """The queries (or those of the late chunk only) have seen this block, [b, g, k, d], as a whole."""
        query, output, logsumexp = self.query, self._output, self._logsumexp
        if late_only:
            query, output, logsumexp = late_chunk(query), late_chunk(output), late_chunk(logsumexp)
        block_output, block_logsumexp, _ = self.kernel.forward(query, key, value, scale=self.scale, causal=False)
        merge_block(output, logsumexp, block_output, block_logsumexp)

    def result(self) -> tuple[Tensor, Tensor]:
        """The output [b, n, l, d] in the queries' dtype and the log-sum-exp [b, n, l] in fp32."""
        return self._output.to(self.query.dtype), self._logsumexp


class BlockGradients:
    """The gradients of what ``BlockAttention`` computed, block by block; sums are in fp32.

    Args:
        grad: [b, n, l, d] of the output.
        output, logsumexp, state: as ``BlockAttention`` left them.
    """

    def __init__(
        self,
        kernel: BlockKernel,
        query: Tensor,
        output: Tensor,
        logsumexp: Tensor,
        grad: Tensor,
        *,
        state: list[Tensor],
        scale: float,
    ) -> None:
        self.kernel, self.query, self.output, self.logsumexp, self.grad = kernel, query, output, logsumexp, grad
        self.state, self.scale = state, scale
        self.grad_query = torch.zeros_like(query, dtype=torch.float32)

    def add(
        self, key: Tensor, value: Tensor, *, causal: bool = False, late_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The gradients of this block's key and value [b, g, k, d]; ``grad_query`` has the block's part."""
        # A kernel reads the log-sum-exp without strides.
        rows = [self.grad, self.query, self.output, self.logsumexp]
        if late_only:
            rows = [late_chunk(x) for x in rows]
        grad, query, output, logsumexp = rows
        grad_query, grad_key, grad_value = self.kernel.backward(
            grad,
            query,
            key,
            value,
            output,
            logsumexp.contiguous(),
            self.state,
            scale=self.scale,
            causal=causal,
        )
        into = late_chunk(self.grad_query) if late_only else self.grad_query
        into.add_(grad_query)
        return grad_key, grad_value

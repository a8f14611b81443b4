"""Attention over a block of keys, with the log-sum-exp by which the results of several blocks are put together.

Causality enters in two shapes only: a block whose keys are the queries' own (``causal``, square), and a block that all
its queries see whole. No kernel's idea of how an oblong causal mask is aligned matters then.

Shapes: b batch, n query heads, g key and value heads, q queries, k keys, d head width.
Source: the merge is arXiv:2112.05682's; backward from output and log-sum-exp is FlashAttention's (arXiv:2205.14135).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from megatron.core.transformer.enums import AttnBackend

aten = torch.ops.aten


class Block(NamedTuple):
    """Queries, and the block of keys and values that they see."""

    query: Tensor
    """[b, n, q, d]"""
    key: Tensor
    """[b, g, k, d]"""
    value: Tensor
    """[b, g, k, d]"""
    scale: float
    """Factor on query-key products."""
    causal: bool
    """The keys are the queries' own, and none sees what comes after it."""


class Attended(NamedTuple):
    """What attention gave, of one block or of whole rows."""

    output: Tensor
    """[b, n, q, d]"""
    logsumexp: Tensor
    """[b, n, q] of the scores, in fp32."""
    state: list[Tensor]
    """What else backward wants to see."""


class BlockKernel(Protocol):
    """Forward and backward of the attention over one block of keys."""

    def forward(self, block: Block) -> Attended:
        """The queries' attention over this block alone."""
        ...

    def backward(self, block: Block, rows: Attended, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The block's part of the gradients of query, key and value.

        Args:
            rows: of the whole rows and not of the block; its ``state`` is what any forward of the same queries gave.
            grad: [b, n, q, d] of ``rows.output``.
        """
        ...


class ExplicitKernel:
    """All scores of a block in memory, in fp32: for CPUs, for fp32, and where unfused attention was asked for."""

    def forward(self, block: Block) -> Attended:
        scores = _scores(block)
        logsumexp = scores.logsumexp(dim=-1)
        probs = (scores - logsumexp.unsqueeze(-1)).exp()
        output = (probs @ block.value.float().unsqueeze(2)).flatten(1, 2)
        return Attended(output.to(block.query.dtype), logsumexp.flatten(1, 2), [])

    def backward(self, block: Block, rows: Attended, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (x.float() for x in block[:3])
        groups = (key.shape[1], -1)
        probs = (_scores(block) - torch.unflatten(rows.logsumexp, 1, groups).unsqueeze(-1)).exp()
        grad = grad.float()
        dot = torch.unflatten((grad * rows.output.float()).sum(-1, keepdim=True), 1, groups)
        grad = torch.unflatten(grad, 1, groups)
        grad_scores = probs * (grad @ value.unsqueeze(2).transpose(-1, -2) - dot) * block.scale
        grad_query = (grad_scores @ key.unsqueeze(2)).flatten(1, 2)
        # Key and value heads serve all query heads of their group.
        grad_key = (grad_scores.transpose(-1, -2) @ torch.unflatten(query, 1, groups)).sum(2)
        grad_value = (probs.transpose(-1, -2) @ grad).sum(2)
        return grad_query, grad_key, grad_value


class FlashKernel:
    """PyTorch's flash attention on CUDA, for bf16 and fp16."""

    def forward(self, block: Block) -> Attended:
        query, key, value, scale, causal = block
        results = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)
        return Attended(results[0], results[1], [results[6], results[7]])

    def backward(self, block: Block, rows: Attended, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, scale, causal = block
        output, logsumexp, state = rows
        lengths = (query.shape[2], key.shape[2])
        result: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, output, logsumexp, None, None, *lengths, 0.0, causal, *state, scale=scale
        )
        return result


class CudnnKernel:
    """cuDNN's attention, which PyTorch prefers on some devices."""

    def forward(self, block: Block) -> Attended:
        query, key, value, scale, causal = block
        results = aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False, scale=scale
        )
        return Attended(results[0], results[1].reshape(query.shape[:3]), [results[6], results[7]])

    def backward(self, block: Block, rows: Attended, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, scale, causal = block
        output, logsumexp, state = rows[0], rows[1].unsqueeze(-1), rows[2]
        nothing, lengths = (None, None, None), (query.shape[2], key.shape[2])  # no bias, and no packed samples
        result: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_cudnn_attention_backward(
            grad, query, key, value, output, logsumexp, *state, *nothing, *lengths, 0.0, causal, scale=scale
        )
        return result


_DEMANDED: dict[Any, type[FlashKernel | CudnnKernel]] = {AttnBackend.flash: FlashKernel, AttnBackend.fused: CudnnKernel}


def choose_kernel(query: Tensor, key: Tensor, value: Tensor, *, scale: float, fused: bool, backend: Any) -> BlockKernel:
    """The kernel for causal attention of [b, n, q, d] with [b, g, q, d]: the one that one rank's attention would run.

    Args:
        fused: not, with all scores in memory.
        backend: ``config.attention_backend``.

    Raises:
        NotImplementedError: ``backend`` demands a kernel that does not serve these tensors.
    """
    if not fused or not query.is_cuda:
        return ExplicitKernel()
    demanded = _DEMANDED.get(backend)
    # Other widths are padded by scaled_dot_product_attention before it calls a kernel; what is called here does not.
    if query.dtype not in (torch.bfloat16, torch.float16) or query.shape[-1] % 8 != 0:
        if demanded is not None:
            raise NotImplementedError(
                f"with context parallelism attention_backend {backend.name} must meet bf16 or fp16 heads of a width that 8"
                f" divides, got {query.dtype} and {query.shape[-1]}; use attention_backend auto, or --bf16"
            )
        return ExplicitKernel()
    if demanded is not None:
        return demanded()
    grouped = key.shape[1] != query.shape[1]
    choice = torch._fused_sdp_choice(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    if choice == SDPBackend.CUDNN_ATTENTION.value:
        return CudnnKernel()
    return FlashKernel() if choice == SDPBackend.FLASH_ATTENTION.value else ExplicitKernel()


def merge_block(output: Tensor, logsumexp: Tensor, block_output: Tensor, block_logsumexp: Tensor) -> None:
    """``output`` [b, n, q, d] and ``logsumexp`` [b, n, q], in fp32, are those over the block's keys too; in place."""
    # As a logistic of the difference, the block's share of the row neither overflows nor loses small shares.
    output.lerp_(block_output.to(output.dtype), torch.sigmoid(block_logsumexp - logsumexp).unsqueeze(-1))
    logsumexp.copy_(torch.logaddexp(logsumexp, block_logsumexp))


def _scores(block: Block) -> Tensor:
    """[b, g, n/g, q, k] in fp32."""
    grouped = torch.unflatten(block.query.float(), 1, (block.key.shape[1], -1))
    scores = (grouped * block.scale) @ block.key.float().unsqueeze(2).transpose(-1, -2)
    if block.causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(diagonal=1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores

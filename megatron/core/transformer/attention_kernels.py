"""Kernels of attention over one block of keys; their log-sum-exps serve to merge the results of several blocks.

A block is either square and causal (the keys are those of the queries' own tokens), or all its queries see all its keys. So
it does not matter how a kernel aligns a causal mask that is not square. Within a window a block is causal, and may have further
keys before those of the queries' own tokens.

Shapes: b batch, n query heads, g key and value heads, q queries, k keys, d head width; that of values and outputs may be another.
Source: the merge is arXiv:2112.05682's; backward from output and log-sum-exp is FlashAttention's (arXiv:2205.14135).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from megatron.core.transformer.enums import AttnBackend

aten = torch.ops.aten


class Block(NamedTuple):
    """Queries and one block of keys and values that they attend to."""

    query: Tensor
    """[b, n, q, d]"""
    key: Tensor
    """[b, g, k, d]"""
    value: Tensor
    """[b, g, k, d]"""
    scale: float
    """Factor on query-key products."""
    causal: bool
    """The last keys are those of the queries' own tokens, under a causal mask; False: all queries see all keys."""
    window: int | None = None
    """Positions before its own that a query of a causal block sees; None: all."""


class Attended(NamedTuple):
    """The result of attention over one block, or over all blocks."""

    output: Tensor
    """[b, n, q, d]"""
    logsumexp: Tensor
    """[b, n, q] log-sum-exp of the scores, fp32."""
    state: list[Tensor]
    """What else the kernel's backward needs, such as the state of random numbers."""


class BlockKernel(Protocol):
    """Forward and backward of the attention over one block of keys."""

    def forward(self, block: Block) -> Attended:
        """Compute attention over this block alone."""
        ...

    def backward(self, block: Block, rows: Attended, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the block's part of the gradients of query, key and value.

        Args:
            rows: the result over all blocks, not this one; its ``state`` is that of any forward of the same queries.
            grad: [b, n, q, d] gradient of ``rows.output``.
        """
        ...


class ExplicitKernel:
    """Attention with all scores of a block in memory, in fp32: for CPUs, for fp32, and for unfused backends."""

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
        query, key, value, scale, causal, _ = block
        results = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)
        return Attended(results[0], results[1], [results[6], results[7]])

    def backward(self, block: Block, rows: Attended, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, scale, causal, _ = block
        output, logsumexp, state = rows
        lengths = (query.shape[2], key.shape[2])
        result: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, output, logsumexp, None, None, *lengths, 0.0, causal, *state, scale=scale
        )
        return result


class WindowFlashKernel:
    """PyTorch's flash attention on CUDA within windows and packs, where it skips the blocks of keys that no query sees.

    Args:
        starts: [m + 1] int32, where the samples of a pack begin, and where the last ends; None: rows are samples.
    """

    def __init__(self, starts: Tensor | None = None) -> None:
        self.starts = starts

    def forward(self, block: Block) -> Attended:
        query, key, value, lengths = self._arguments(block)
        output, logsumexp, *state, _ = aten._flash_attention_forward(
            query, key, value, *lengths, 0.0, block.causal, False, **self._options(block)
        )
        if self.starts is not None:
            output, logsumexp = output.unsqueeze(0), logsumexp.unsqueeze(0)
        return Attended(output.transpose(1, 2), logsumexp, state)

    def backward(self, block: Block, rows: Attended, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, lengths = self._arguments(block)
        output, grad = rows.output.transpose(1, 2), grad.transpose(1, 2)
        logsumexp = rows.logsumexp
        if self.starts is not None:
            output, grad, logsumexp = output.squeeze(0), grad.squeeze(0), logsumexp.squeeze(0)
        grads = aten._flash_attention_backward(
            grad, query, key, value, output, logsumexp, *lengths, 0.0, block.causal, *rows.state, **self._options(block)
        )
        if self.starts is not None:
            grads = [x.unsqueeze(0) for x in grads]
        grad_query, grad_key, grad_value = (x.transpose(1, 2) for x in grads)
        return grad_query, grad_key, grad_value

    def _arguments(self, block: Block) -> tuple[Tensor, Tensor, Tensor, tuple[Any, ...]]:
        """Return queries, keys and values [b, s, n, d] ([t, n, d] of a pack), and what says how long samples are."""
        query, key, value = (x.transpose(1, 2) for x in block[:3])
        lengths = (self.starts, self.starts, block.query.shape[2], block.key.shape[2])
        if self.starts is not None:
            query, key, value = query.squeeze(0), key.squeeze(0), value.squeeze(0)
        return query, key, value, lengths

    def _options(self, block: Block) -> dict[str, Any]:
        if block.window is None:
            return {"scale": block.scale}
        return {"scale": block.scale, "window_size_left": block.window, "window_size_right": 0}


class CudnnKernel:
    """cuDNN's attention, which PyTorch prefers on some devices."""

    def forward(self, block: Block) -> Attended:
        query, key, value, scale, causal, _ = block
        results = aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False, scale=scale
        )
        return Attended(results[0], results[1].reshape(query.shape[:3]), [results[6], results[7]])

    def backward(self, block: Block, rows: Attended, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, scale, causal, _ = block
        output, logsumexp, state = rows[0], rows[1].unsqueeze(-1), rows[2]
        nothing, lengths = (None, None, None), (query.shape[2], key.shape[2])  # no bias, and no packed samples
        result: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_cudnn_attention_backward(
            grad, query, key, value, output, logsumexp, *state, *nothing, *lengths, 0.0, causal, scale=scale
        )
        return result


class PaddedKernel:
    """A kernel that takes heads of one width alone, for values of another: [Note: widths of values]."""

    def __init__(self, kernel: BlockKernel) -> None:
        self.kernel = kernel

    def forward(self, block: Block) -> Attended:
        wide = self.kernel.forward(_padded(block))
        return Attended(wide.output[..., : block.value.shape[-1]], wide.logsumexp, wide.state)

    def backward(self, block: Block, rows: Attended, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = _padded(block)
        _, output, grad = pad_heads(wide.query, rows.output, grad)
        grads = self.kernel.backward(wide, Attended(output, rows.logsumexp, rows.state), grad)
        grad_query, grad_key, grad_value = (x[..., : y.shape[-1]] for x, y in zip(grads, block[:3], strict=True))
        return grad_query, grad_key, grad_value


def pad_heads(*heads: Tensor) -> tuple[Tensor, ...]:
    """Pad tensors [..., d] of different widths with zeros to the largest width."""
    widest = max(x.shape[-1] for x in heads)
    # Padding by nothing would be a copy.
    return tuple(x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in heads)


def _padded(block: Block) -> Block:
    query, key, value = pad_heads(*block[:3])
    return block._replace(query=query, key=key, value=value)


_DEMANDED: dict[Any, type[FlashKernel | CudnnKernel]] = {AttnBackend.flash: FlashKernel, AttnBackend.fused: CudnnKernel}


def choose_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    fused: bool,
    backend: Any,
    window: int | None = None,
) -> BlockKernel:
    """Choose the kernel that attention on one rank would run for [b, n, q, d] with [b, g, q, d].

    Args:
        fused: False: keep all scores in memory.
        backend: ``config.attention_backend``.
        window: positions before its own that a query sees; None: all.

    Raises:
        NotImplementedError: ``backend`` demands a kernel that does not support these tensors.
    """
    if not fused or not query.is_cuda:
        return ExplicitKernel()
    demanded = _DEMANDED.get(backend)
    # scaled_dot_product_attention pads other widths before it calls a kernel; the kernels called here do not.
    if query.dtype not in (torch.bfloat16, torch.float16) or query.shape[-1] % 8 or value.shape[-1] % 8:
        if demanded is not None:
            raise NotImplementedError(
                f"with context parallelism, windows or sinks attention_backend {backend.name} needs bf16 or fp16 heads of a"
                f" width that is a multiple of 8, got {query.dtype} and {query.shape[-1]}; use attention_backend auto, or"
                " --bf16"
            )
        return ExplicitKernel()
    differ = value.shape[-1] != query.shape[-1]
    if window is not None:
        if demanded is CudnnKernel:
            raise NotImplementedError(
                "attention_backend fused has no kernel for windows that PyTorch could call, got a layer with a window of"
                f" {window}; use attention_backend auto or flash, or layers of transformer-engine"
            )
        return PaddedKernel(WindowFlashKernel()) if differ else WindowFlashKernel()
    kernel = demanded or _chosen(query, key, value, scale=scale)
    if kernel is not CudnnKernel and differ and demanded is None:
        kernel = _chosen(query, key, key, scale=scale)
    return PaddedKernel(kernel()) if differ and kernel is FlashKernel else kernel()


def _chosen(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float
) -> type[ExplicitKernel | FlashKernel | CudnnKernel]:
    """Return the kernel that torch would choose."""
    grouped = key.shape[1] != query.shape[1]
    choice = torch._fused_sdp_choice(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    if choice == SDPBackend.CUDNN_ATTENTION.value:
        return CudnnKernel
    return FlashKernel if choice == SDPBackend.FLASH_ATTENTION.value else ExplicitKernel


def merge_block(output: Tensor, logsumexp: Tensor, block_output: Tensor, block_logsumexp: Tensor) -> None:
    """Merge a block's result into ``output`` [b, n, q, d] and ``logsumexp`` [b, n, q], fp32, in place."""
    # The block's weight is a logistic of the difference, which neither overflows nor loses small weights.
    output.lerp_(block_output.to(output.dtype), torch.sigmoid(block_logsumexp - logsumexp).unsqueeze(-1))
    logsumexp.copy_(torch.logaddexp(logsumexp, block_logsumexp))


def _scores(block: Block) -> Tensor:
    """Compute the scores [b, g, n/g, q, k] in fp32, masked where the block is causal."""
    grouped = torch.unflatten(block.query.float(), 1, (block.key.shape[1], -1))
    scores = (grouped * block.scale) @ block.key.float().unsqueeze(2).transpose(-1, -2)
    if block.causal:
        hidden = causal_mask(scores.shape[-2], scores.shape[-1], scores.device, block.window)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def causal_mask(num_queries: int, num_keys: int, device: torch.device, window: int | None = None) -> Tensor:
    """Make the mask [q, k], bool, True where a key comes after its query, or too far before it.

    Args:
        num_keys: of them the last ``num_queries`` are those of the queries' own tokens.
        window: positions before its own that a query sees; None: all.
    """
    before = num_keys - num_queries
    hidden = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    after = hidden.triu(diagonal=before + 1)
    return after if window is None else after.logical_or_(hidden.tril(diagonal=before - window - 1))

"""Core attention, softmax(q k^T) v, by fused kernels where no mask is given.

Shapes: s sequence, b batch, n query heads, g key and value heads, d head width. Values may have another width than queries and
keys ([Note: widths of values]).

[Note: widths of values] Kernels differ in what they take: cuDNN's and the one that keeps all scores take values of any width,
FlashAttention those of the queries' width alone. There, what is narrower is padded with zeros, and the context is cut: two widths
of 192 and 128 then cost as two of 192.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core.fusions.fused_softmax import MASKED, scaled_masked_softmax
from megatron.core.packed_seq_params import DocumentsOfRows, PackedSeqParams, check_pack
from megatron.core.transformer.attention_kernels import (
    PaddedKernel,
    WindowFlashKernel,
    causal_mask,
    choose_kernel,
    pad_heads,
)
from megatron.core.transformer.attention_patterns import window_of_layer
from megatron.core.transformer.attention_sinks import AttentionSinks
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.kernel_attention import kernel_attention
from megatron.core.transformer.layer_arguments import check_cp_comm_type
from megatron.core.transformer.module import MegatronModule

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.attention_kernels import BlockKernel
    from megatron.core.transformer.transformer_config import TransformerConfig

_KERNELS: dict[object, SDPBackend] = {
    AttnBackend.flash: SDPBackend.FLASH_ATTENTION,
    AttnBackend.fused: SDPBackend.CUDNN_ATTENTION,
}


class DotProductAttention(AttentionSinks, MegatronModule):
    """Causal core attention; selective recomputation recomputes this module.

    It attends within a window where ``config.window_size`` and ``window_attn_skip_freq`` say so, and has sinks by
    ``config.softmax_type``; only learned ones are a parameter.

    Args:
        k_channels: width of a query and a key, where it is not ``config.kv_channels``.
        v_channels: width of a value; it is that of the values of each call.

    Source: arXiv:1706.03762, grouped as in arXiv:2305.13245; the layer scaling is Megatron-Core's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        MegatronModule.__init__(self, config)
        check_cp_comm_type(config, cp_comm_type)
        if attn_mask_type is not AttnMaskType.causal:
            raise NotImplementedError(f"attn_mask_type must be causal, got {attn_mask_type}: others are not served")
        if attention_type != "self":
            raise NotImplementedError(
                f"attention_type must be 'self', got {attention_type!r}: GPT has no other attention"
            )
        self.attention_dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.layer_scale = float(max(1, layer_number)) if config.apply_query_key_layer_scaling else 1.0
        backend = config.attention_backend
        self.fused = self.layer_scale == 1.0 and backend not in (AttnBackend.unfused, AttnBackend.local)
        self.only_kernel = _KERNELS.get(backend)
        scale = softmax_scale if softmax_scale is not None else config.softmax_scale
        self.softmax_scale = 1.0 / math.sqrt(k_channels or config.kv_channels or 1) if scale is None else scale
        self.window = window_of_layer(config, layer_number)
        self.add_sinks(config, pg_collection)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Compute the context [s, b, n * d] of query [s, b, n, d], key and value [s, b, g, d].

        Args:
            attention_mask: bool, broadcastable to [b, n, s, s], True where a key is hidden; as in Megatron-Core it replaces
                the causal mask; a window hides further keys. None: causal.
            attn_mask_type: must be causal, or None.
            attention_bias: must be None.
            packed_seq_params: samples within which queries see keys; b is 1 then, and it replaces the mask.

        Raises:
            TypeError: the mask is not of dtype bool.
            RuntimeError: ``config.deterministic_mode`` on CUDA without torch's deterministic algorithms.
        """
        if isinstance(packed_seq_params, DocumentsOfRows):
            return self._within_documents(query, key, value, packed_seq_params)
        self._check(query, attention_mask)
        check_core_attention(attn_mask_type, attention_bias)
        sinks = self.sinks(query)
        is_plain = self.window is None and sinks is None
        dropout = self.attention_dropout if self.training else 0.0
        starts = None
        if packed_seq_params is not None and packed_seq_params.is_packed:
            check_pack(packed_seq_params, query.shape[1])
            if can_attend_packed(query, packed_seq_params, dropout=dropout) and self.fused:
                if is_plain:
                    return fused_packed_attention(query, key, value, packed_seq_params, scale=self.softmax_scale)
                starts = starts_of_samples(packed_seq_params, query.shape[0])
            else:
                attention_mask = packed_seq_params.causal_mask(query.shape[0])
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if attention_mask is not None or not self.fused or (dropout > 0.0 and not is_plain):
            context = self._explicit(query, key, value, sinks, attention_mask, dropout)
        elif is_plain:
            with self._kernels(query):
                context = fused_causal_attention(query, key, value, scale=self.softmax_scale, dropout=dropout)
        else:
            context = self._by_kernel(query, key, value, sinks, starts)
        return context.permute(2, 0, 1, 3).flatten(2)

    def _within_documents(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: DocumentsOfRows
    ) -> torch.Tensor:
        """Compute the context [s, b, n * d] of queries that see the keys of their own document."""
        dropout = self.attention_dropout if self.training else 0.0
        if not (self.fused and can_attend_packed(query, documents, dropout=dropout)):
            return self.forward(query, key, value, documents.mask())
        query, key, value = (documents.packed(x) for x in (query, key, value))
        return documents.unpacked(self.forward(query, key, value, None, packed_seq_params=documents.as_pack()))

    def _by_kernel(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        starts: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute attention [b, n, s, d] within the window and with sinks; key and value are [b, g, s, d]."""
        scale, window = self.softmax_scale, self.window
        kernel: BlockKernel = WindowFlashKernel(starts)
        if starts is None:
            kernel = self.kernel(query, key, value)
        elif value.shape[-1] != query.shape[-1]:
            kernel = PaddedKernel(kernel)
        return kernel_attention(query, key, value, sinks, kernel=kernel, scale=scale, window=window)

    def kernel(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> BlockKernel:
        """Choose the kernel of attention [b, n, q, d] over [b, g, k, d] that gives its log-sum-exp."""
        backend, scale, window = self.config.attention_backend, self.softmax_scale, self.window
        return choose_kernel(query, key, value, scale=scale, fused=self.fused, backend=backend, window=window)

    def _explicit(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        dropout: float,
    ) -> torch.Tensor:
        """Compute attention [b, n, s, d] with all scores in memory; key and value are [b, g, s, d], sinks [n]."""
        key, value = _expand_heads(key, value, query.shape[1])
        scores = (query * (self.softmax_scale / self.layer_scale)) @ key.transpose(-1, -2)
        if attention_mask is None or self.window is not None:
            hidden = causal_mask(scores.shape[-2], scores.shape[-1], scores.device, self.window)
            attention_mask = hidden if attention_mask is None else attention_mask | hidden
        if self.config.masked_softmax_fusion and sinks is None:
            compiled = not self.config.disable_jit_fuser
            probs = scaled_masked_softmax(scores, attention_mask, self.layer_scale, compiled=compiled)
        else:
            if self.config.attention_softmax_in_fp32:
                scores = scores.float()
            if self.layer_scale != 1.0:
                scores = scores * self.layer_scale
            scores = scores.masked_fill(attention_mask, MASKED)
            probs = (scores.softmax(dim=-1) if sinks is None else _softmax_with(scores, sinks)).to(query.dtype)
        return F.dropout(probs, p=dropout, training=dropout > 0.0) @ value

    def _kernels(self, query: torch.Tensor) -> AbstractContextManager[None]:
        if self.only_kernel is None or not query.is_cuda:
            return nullcontext()
        return sdpa_kernel(self.only_kernel)

    def _check(self, query: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
        if attention_mask is not None and attention_mask.dtype is not torch.bool:
            raise TypeError(
                f"attention_mask must be of dtype bool with True where a key is hidden, got {attention_mask.dtype};"
                " pass e.g. mask < 0.5"
            )
        if self.config.deterministic_mode and query.is_cuda and not torch.are_deterministic_algorithms_enabled():
            raise RuntimeError(
                "deterministic_mode must go with torch's deterministic algorithms, got them off; call"
                " torch.use_deterministic_algorithms(True) before the first forward pass"
            )


def fused_causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, dropout: float
) -> torch.Tensor:
    """Compute causal attention of [b, n, s, d] over [b, g, s, d] by torch's fused kernels, without making a mask.

    Values may have another width than queries and keys: [Note: widths of values].
    """
    width = value.shape[-1]
    if width != query.shape[-1] and not _takes_two_widths(query, key, value, scale=scale, dropout=dropout):
        query, key, value = pad_heads(query, key, value)
        return fused_causal_attention(query, key, value, scale=scale, dropout=dropout)[..., :width]
    grouped = key.shape[1] != query.shape[1]
    # Only the half-precision CUDA kernels support grouped heads; elsewhere torch would fall back to the unfused path.
    if grouped and not (query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)):
        key, value = _expand_heads(key, value, query.shape[1])
        grouped = False
    return F.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=grouped
    )


def _takes_two_widths(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, dropout: float
) -> bool:
    """Return whether torch would compute these widths by cuDNN's kernel: others are slower than with padded heads."""
    if not query.is_cuda or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    grouped = key.shape[1] != query.shape[1]
    try:
        choice = torch._fused_sdp_choice(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=grouped
        )
    except RuntimeError:  # of the kernels that are allowed none takes them as they are
        return False
    return bool(choice == SDPBackend.CUDNN_ATTENTION.value)


def check_core_attention(attn_mask_type: AttnMaskType | None, attention_bias: object) -> None:
    """Raise NotImplementedError for arguments of Megatron-Core's core attention that are not served."""
    if attn_mask_type not in (None, AttnMaskType.causal, AttnMaskType.padding_causal):
        raise NotImplementedError(f"attn_mask_type must be causal, got {attn_mask_type}; pass an attention_mask")
    if attention_bias is not None:
        raise NotImplementedError(
            f"attention_bias must be None, got {type(attention_bias).__name__}: scores have no bias"
        )


def can_attend_packed(query: torch.Tensor, packed: PackedSeqParams, *, dropout: float) -> bool:
    """Return whether torch's flash kernel computes a pack: half precision on CUDA, with the longest sample known."""
    is_half = query.dtype in (torch.bfloat16, torch.float16) and query.is_cuda
    return is_half and query.shape[-1] % 8 == 0 and dropout == 0.0 and packed.max_seqlen_q is not None


def fused_packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSeqParams, *, scale: float
) -> torch.Tensor:
    """Compute causal attention within each sample, [t, 1, n, d] over [t, 1, g, d] to [t, 1, n * d], by the flash kernel."""
    starts = starts_of_samples(packed, query.shape[0])
    longest = query.shape[0]  # a bound that needs no read from the device
    width = value.shape[-1]
    if width != query.shape[-1]:
        query, key, value = pad_heads(query, key, value)
    results = torch.ops.aten._flash_attention_forward(
        query.squeeze(1),
        key.squeeze(1),
        value.squeeze(1),
        starts,
        starts,
        longest,
        longest,
        0.0,
        True,
        False,
        scale=scale,
    )
    context: torch.Tensor = results[0][..., :width]
    return context.flatten(1).unsqueeze(1)


def starts_of_samples(packed: PackedSeqParams, num_tokens: int) -> torch.Tensor:
    """Return where samples begin, int32; what lies behind them is one more."""
    starts = packed.starts_or_none()
    assert starts is not None and packed.max_seqlen_q is not None
    return F.pad(starts, (0, 1), value=num_tokens).to(torch.int32)


def _softmax_with(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Compute the softmax of scores [b, n, s, s] beside one more of each head, [n], whose probability is left out."""
    column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
    return torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]


def _expand_heads(key: torch.Tensor, value: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Repeat each key and value head for the query heads of its group: [b, g, s, d] -> [b, n, s, d]."""
    repeats = num_heads // key.shape[1]
    if repeats == 1:
        return key, value
    return key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)

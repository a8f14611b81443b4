"""Core attention of transformer-engine under Megatron-Core's name. Importing this file without the package raises ImportError.

Shapes: s sequence, b batch, n query heads, g key and value heads, d head width.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron.core.extensions.transformer_engine_layers import FP8GlobalStateManager, QuantizationState, te
from megatron.core.packed_seq_params import DocumentsOfRows, check_pack
from megatron.core.process_groups_config import group_of, group_size
from megatron.core.transformer.attention_patterns import window_of_layer
from megatron.core.transformer.attention_sinks import AttentionSinks
from megatron.core.transformer.context_parallel import comm_type_of_layer
from megatron.core.transformer.dot_product_attention import check_core_attention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.parameter_init import SeededParameters

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

_BACKENDS = {
    AttnBackend.flash: "NVTE_FLASH_ATTN",
    AttnBackend.fused: "NVTE_FUSED_ATTN",
    AttnBackend.unfused: "NVTE_UNFUSED_ATTN",
    AttnBackend.local: "NVTE_UNFUSED_ATTN",
}


class TEDotProductAttention(QuantizationState, AttentionSinks, te.DotProductAttention):  # type: ignore[misc, unused-ignore]
    """Causal core attention; in FP8 with ``config.fp8_dot_product_attention``. Only learned sinks are a parameter.

    Args:
        pg_collection: heads are split over its ``tp``, sequences over its ``cp``.
        cp_comm_type: None: the configured one.
        k_channels, v_channels: widths of a query or key and of a value, where they are not ``config.kv_channels``.

    Raises:
        NotImplementedError: another mask or kind of attention, ``apply_query_key_layer_scaling``, or a window or sinks with
            a way to exchange keys that transformer-engine does not serve.
        RuntimeError: ``config.deterministic_mode`` without torch's deterministic algorithms; ``attention_backend='flash'``
            without the package flash-attn.

    Source: Megatron-Core's class of this name.
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
        _check_attention(config, attn_mask_type, attention_type)
        tp_group, cp_group = group_of(pg_collection, "tp"), group_of(pg_collection, "cp")
        init: dict[str, Any] = {}
        if cp_group is not None and cp_group.size() > 1:
            comm_type = cp_comm_type or comm_type_of_layer(config.cp_comm_type, layer_number)
            init = {"cp_group": cp_group, "cp_global_ranks": dist.get_process_group_ranks(cp_group)}
            init |= {"cp_stream": torch.cuda.Stream(), "cp_comm_type": comm_type}
            _check_exchange(config, layer_number, comm_type)
        window = window_of_layer(config, layer_number)
        if window is not None:
            init["window_size"] = (window, 0)
        if config.softmax_type != "vanilla":
            init["softmax_type"] = config.softmax_type
        super(SeededParameters, self).__init__(
            num_attention_heads=config.num_attention_heads,
            kv_channels=config.kv_channels if k_channels is None or v_channels is None else (k_channels, v_channels),
            num_gqa_groups=config.num_query_groups,
            attention_dropout=config.attention_dropout if attention_dropout is None else attention_dropout,
            attn_mask_type=attn_mask_type.name,
            # The caller draws each tensor-parallel rank's own dropout: MegatronModule.drawing_apart.
            sequence_parallel=config.sequence_parallel,
            tp_size=group_size(tp_group),
            tp_group=tp_group,
            layer_number=layer_number,
            attention_type=attention_type,
            softmax_scale=config.softmax_scale if softmax_scale is None else softmax_scale,
            **init,
        )
        self.config = config
        if config.softmax_type == "learnable":
            del self.softmax_offset  # ours starts as that of local layers
        self.add_sinks(config, pg_collection)
        self._choose_kernels(config.attention_backend)

    def _choose_kernels(self, backend: object) -> None:
        """Have transformer-engine use the configured kernels: it is told by the process's environment."""
        if backend in _BACKENDS:
            for name in _BACKENDS.values():
                os.environ[name] = str(int(name == _BACKENDS[backend]))

    def reset_parameters(self, defer_init: bool | None = None) -> None:
        """Fill the sinks; transformer-engine's constructor, which may call this too, leaves them alone."""
        if "_parts" in self.__dict__:
            AttentionSinks.reset_parameters(self)

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
        """Compute the context [s, b, n * d] of query [s, b, n, d], key and value [s, b, g, d]; see ``DotProductAttention``.

        Raises:
            TypeError: the mask is not of dtype bool.
        """
        check_core_attention(attn_mask_type, attention_bias)
        if isinstance(packed_seq_params, DocumentsOfRows):
            query, key, value = (packed_seq_params.packed(x) for x in (query, key, value))
            return packed_seq_params.unpacked(self._within_samples(query, key, value, packed_seq_params.as_pack()))
        if packed_seq_params is not None and packed_seq_params.is_packed:
            return self._within_samples(query, key, value, packed_seq_params)
        if attention_mask is not None and attention_mask.dtype is not torch.bool:
            raise TypeError(
                f"attention_mask must be of dtype bool with True where a key is hidden, got {attention_mask.dtype};"
                " pass e.g. mask < 0.5"
            )
        in_fp8 = self.config.fp8_multi_head_attention and FP8GlobalStateManager.is_fp8_enabled()
        context: torch.Tensor = super().forward(
            query,
            key,
            value,
            attention_mask=attention_mask,
            attn_mask_type="causal" if attention_mask is None else "arbitrary",
            fp8_output=in_fp8,
        )
        return context

    def _within_samples(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSeqParams
    ) -> torch.Tensor:
        """Compute the context [t, 1, n * d] of a pack. Samples are those of its padded starts, where it has them."""
        check_pack(packed, query.shape[1], cp_size=self.config.context_parallel_size)
        # The longest sample with its padding, and what lies behind all of them: max_seqlen_q may be without.
        starts, longest = packed.covering(query.shape[0], query.device)
        context: torch.Tensor = super().forward(
            query.squeeze(1),
            key.squeeze(1),
            value.squeeze(1),
            qkv_format="thd",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            attn_mask_type="padding_causal",
        )
        return context.unsqueeze(1)


def _check_exchange(config: TransformerConfig, layer_number: int, comm_type: str) -> None:
    """Raise where transformer-engine has no kernel for a window or sinks with this exchange between context-parallel ranks."""
    served = {"window_size": ("a2a", "all_gather"), "softmax_type": ("a2a",)}
    used = {
        "window_size": window_of_layer(config, layer_number) is not None,
        "softmax_type": config.softmax_type != "vanilla",
    }
    for field, comm_types_served in served.items():
        if used[field] and comm_type not in comm_types_served:
            raise NotImplementedError(
                f"with {field} and transformer-engine's attention cp_comm_type must be {' or '.join(comm_types_served)}, got"
                f" {comm_type!r}: it has no other exchange for them; change it, or use --transformer-impl local"
            )


def _check_attention(config: TransformerConfig, attn_mask_type: AttnMaskType, attention_type: str) -> None:
    if attn_mask_type is not AttnMaskType.causal or attention_type != "self":
        raise NotImplementedError(
            f"attention must be causal self-attention, got {attn_mask_type} and {attention_type!r}: others are not served"
        )
    if config.apply_query_key_layer_scaling:
        raise NotImplementedError(
            "apply_query_key_layer_scaling must be False with transformer-engine's attention, got True: it computes scores in"
            " fp32, which need no scaling; leave the flag out, or use --transformer-impl local"
        )
    if config.deterministic_mode and not torch.are_deterministic_algorithms_enabled():
        raise RuntimeError(
            "deterministic_mode must go with torch's deterministic algorithms, got them off; call"
            " torch.use_deterministic_algorithms(True) before the model is built"
        )
    packages = ("flash_attn", "flash_attn_interface", "flash_attn_3")
    if config.attention_backend is AttnBackend.flash and not any(map(importlib.util.find_spec, packages)):
        raise RuntimeError(
            "attention_backend='flash' needs the package flash-attn for transformer-engine's attention, got none; install"
            " it, or use --attention-backend fused, or --transformer-impl local, whose flash kernel is PyTorch's"
        )

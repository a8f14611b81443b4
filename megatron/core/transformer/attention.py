"""Self-attention with a fused query-key-value projection.

Shapes: s sequence, b batch, h hidden size, n query heads, g key and value heads (groups), d head width; n and g count
this tensor-parallel rank's heads. The projection's output holds, group after group, the group's n/g query heads (then as many
of their gates, with ``attention_output_gate``), then its key head, then its value head, so a rank's rows of it are whole groups.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from megatron.core.fp8_utils import recomputation_in_fp8
from megatron.core.fusions.fused_rope import fused_rotate, fused_split_and_rotate
from megatron.core.models.common.embeddings.rotary_pos_embedding import apply_rotary
from megatron.core.process_groups_config import group_of, group_size
from megatron.core.tensor_parallel.partition import part_extent
from megatron.core.transformer.attention_patterns import rotates, window_of_layer
from megatron.core.transformer.context_parallel_attention import core_attention_for
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.layer_arguments import check_cp_comm_type, check_layer_arguments
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.parameter_init import SeededParameters
from megatron.core.transformer.recomputation import recomputes
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.torch_norm import L2Norm

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class SelfAttentionSubmodules:
    """The specs of the modules of a self-attention."""

    linear_qkv: ModuleSpec | type
    core_attention: ModuleSpec | type
    linear_proj: ModuleSpec | type
    q_layernorm: ModuleSpec | type | None = None
    k_layernorm: ModuleSpec | type | None = None


class Attention(MegatronModule):
    """What attentions have in common: the call of core attention, with its dropout and its recomputation."""

    core_attention: Any

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Compute the context [s, b, n * d] of the values.

        Args:
            packed_seq_params: given where there are samples within which tokens attend.
        """
        draws = self.training and self.config.attention_dropout > 0
        core_attention: Callable[..., torch.Tensor] = self.core_attention
        if packed_seq_params is not None:
            core_attention = partial(core_attention, packed_seq_params=packed_seq_params)
        # Each tensor-parallel rank has its own heads, so it draws its own dropout.
        with self.drawing_apart(query, draws):
            if recomputes(self.config, "core_attn") and self.training:
                context: torch.Tensor = checkpoint(
                    core_attention,
                    query,
                    key,
                    value,
                    attention_mask,
                    use_reentrant=False,
                    preserve_rng_state=draws,  # a CUDA graph could not restore it
                    context_fn=self._recomputation,
                )
                return context
            return core_attention(query, key, value, attention_mask)

    def _recomputation(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of core attention and of its recomputation."""
        if self.config.fp8_dot_product_attention:
            return recomputation_in_fp8([self.core_attention])
        return nullcontext(), nullcontext()


class SelfAttention(Attention):
    """Self-attention: project to queries, keys and values, normalise and rotate them where configured, attend, project back.

    Args:
        pg_collection: heads are split over its ``tp``, sequences over its ``cp``.

    Raises:
        ValueError: the spec and ``config.qk_layernorm`` or ``qk_l2_norm`` disagree about the norms of queries and keys, or
            the number of heads or key-value heads is not a multiple of the ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config)
        check_cp_comm_type(config, cp_comm_type)
        check_layer_arguments("SelfAttention", pp_layer_offset=pp_layer_offset, name=name)
        if config.multi_latent_attention:
            raise ValueError(
                "an MLATransformerConfig must come with a layer spec of multi-latent attention, got one with SelfAttention; pass"
                " multi_latent_attention=True to the function that makes the spec, or use get_gpt_decoder_block_spec(config)"
            )
        self.layer_number = layer_number
        num_heads, num_groups = config.num_attention_heads, config.num_query_groups or 1
        self.head_width = config.kv_channels or 1
        tp_group = group_of(pg_collection, "tp")
        self.is_split = group_size(tp_group) > 1
        self.num_heads = part_extent(num_heads, 1, group_size(tp_group))
        self.num_groups = part_extent(num_groups, 1, group_size(tp_group))
        self.is_gated, self.rotates = config.attention_output_gate, rotates(config, layer_number)
        self.has_window = window_of_layer(config, layer_number) is not None
        linear: dict[str, Any] = {"config": config, "init_method": config.init_method, "tp_group": tp_group}
        self.linear_qkv = build_module(
            submodules.linear_qkv,
            config.hidden_size,
            (num_heads * (2 if self.is_gated else 1) + 2 * num_groups) * self.head_width,
            gather_output=False,
            bias=config.add_bias_linear or config.add_qkv_bias,
            skip_bias_add=False,
            **linear,
        )
        self.core_attention = build_module(
            core_attention_for(submodules.core_attention, pg_collection),
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            pg_collection=pg_collection,
        )
        linear["init_method"] = config.output_layer_init_method
        self.linear_proj = build_module(
            submodules.linear_proj,
            num_heads * self.head_width,
            config.hidden_size,
            input_is_parallel=True,
            bias=config.add_bias_linear,
            skip_bias_add=True,
            **linear,
        )
        self._check_norms(submodules)
        self.q_layernorm = self._build_norm(submodules.q_layernorm)
        self.k_layernorm = self._build_norm(submodules.k_layernorm)

    def _check_norms(self, submodules: SelfAttentionSubmodules) -> None:
        for name in ("q_layernorm", "k_layernorm"):
            norm = getattr(submodules, name)
            for field, in_spec in (
                ("qk_layernorm", norm not in (None, IdentityOp, L2Norm)),
                ("qk_l2_norm", norm is L2Norm),
            ):
                if in_spec != getattr(self.config, field):
                    raise ValueError(
                        f"the layer spec and TransformerConfig must agree on {field}, got {in_spec} in the spec"
                        f" ({name}) and {getattr(self.config, field)} in the config; pass the same value to both"
                    )

    def _build_norm(self, spec: ModuleSpec | type | None) -> torch.nn.Module | None:
        if spec is None or spec is IdentityOp:
            return None
        norm: torch.nn.Module = build_module(
            spec, config=self.config, hidden_size=self.head_width, eps=self.config.layernorm_epsilon
        )
        if self.is_split and isinstance(norm, SeededParameters):
            # All ranks hold these weights and each rank's heads give a part of their gradient, also without sequence parallelism.
            norm.sum_gradients_over_tensor_ranks()
        return norm

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        rotary_pos_emb: torch.Tensor | None = None,
        rotary_pos_cos: torch.Tensor | None = None,
        rotary_pos_sin: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend over [s, b, h]; return [s, b, h] and the bias [h] that the caller still has to add (or None).

        With sequence parallelism input and output are this rank's part of the sequence; masks and tables are of all of it.

        Args:
            attention_mask: see ``DotProductAttention.forward``; None is causal.
            rotary_pos_emb: angles [s, 1, 1, r] as ``RotaryEmbedding`` returns them; used where no tables are given.
            rotary_pos_cos: [s, r/2] table of cosines (r: the rotated width); or two, [2, s, r/2], of which layers with a
                window take the second.
            rotary_pos_sin: [s, r/2] table of sines.
            packed_seq_params: samples within which tokens attend; angles and tables are those of positions in the whole
                sequence, and are taken anew from each sample's start.
        """
        if rotary_pos_emb is not None:
            rotary_pos_cos, rotary_pos_sin = self._tables(rotary_pos_emb)
        is_packed = packed_seq_params is not None and packed_seq_params.is_packed
        if not self.rotates:
            rotary_pos_cos = rotary_pos_sin = None
        if rotary_pos_cos is not None and rotary_pos_sin is not None:
            if rotary_pos_cos.dim() == 3:
                rotary_pos_cos, rotary_pos_sin = (
                    rotary_pos_cos[int(self.has_window)],
                    rotary_pos_sin[int(self.has_window)],
                )
            if is_packed:
                rotary_pos_cos, rotary_pos_sin = tables_of_samples(packed_seq_params, rotary_pos_cos, rotary_pos_sin)
            query, key, value, gate = self._rotated(hidden_states, rotary_pos_cos, rotary_pos_sin)
        else:
            query, key, value, gate = self._projected(hidden_states)
            query = query.flatten(2, 3)  # a view after a norm, otherwise a copy
        context = self.attend(query, key, value, attention_mask, packed_seq_params if is_packed else None)
        if gate is not None:
            context = (context * torch.sigmoid(gate.float())).to(context.dtype)
        output, bias = self.linear_proj(context)
        return output, bias

    def _rotated(
        self, hidden_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Project [s, b, h] to rotated queries [s, b, n, d] and keys [s, b, g, d], values [s, b, g, d] and gates or None."""
        config = self.config
        interleaved, compiled = config.rotary_interleaved, not config.disable_jit_fuser
        if config.apply_rope_fusion and self.q_layernorm is None and self.k_layernorm is None and not self.is_gated:
            mixed, _ = self.linear_qkv(hidden_states)
            query, key, value = fused_split_and_rotate(
                mixed,
                cos,
                sin,
                num_groups=self.num_groups,
                head_width=self.head_width,
                interleaved=interleaved,
                compiled=compiled,
            )
            return query, key, value, None
        query, key, value, gate = self._projected(hidden_states)
        if config.apply_rope_fusion:
            query = fused_rotate(query, cos, sin, interleaved=interleaved, compiled=compiled)
            key = fused_rotate(key, cos, sin, interleaved=interleaved, compiled=compiled)
        else:
            query = apply_rotary(query, cos, sin, interleaved=interleaved)
            key = apply_rotary(key, cos, sin, interleaved=interleaved)
        if self.q_layernorm is None:
            # A view would keep the whole query-key-value projection in memory until backward.
            value = value.contiguous()
        # A view of what the rotation wrote.
        return query.flatten(2, 3), key, value, gate

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project [s, b, h] to queries [s, b, g, n/g, d], keys [s, b, g, d] and values [s, b, g, d]."""
        return self._projected(hidden_states)[:3]

    def _projected(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """As ``get_query_key_value_tensors``, and the gates [s, b, n * d] of the context; None where it has none."""
        mixed, _ = self.linear_qkv(hidden_states)
        mixed = mixed.unflatten(-1, (self.num_groups, -1, self.head_width))
        heads, gate = self.num_heads // self.num_groups, None
        if self.is_gated:
            query, gate, key, value = mixed.split([heads, heads, 1, 1], dim=3)
            gate = gate.flatten(2)
        else:
            query, key, value = mixed.split([heads, 1, 1], dim=3)
        key, value = key.squeeze(3), value.squeeze(3)
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        return query, key, value, gate

    def _tables(self, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the [s, r/2] cosines and sines of [s, 1, 1, r] angles, which hold each angle twice."""
        angles = angles[:, 0, 0]
        angles = angles[:, ::2] if self.config.rotary_interleaved else angles[:, : angles.shape[-1] // 2]
        return angles.cos(), angles.sin()


def tables_of_samples(
    packed: PackedSeqParams | None, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take rows of the tables [s, r/2] such that positions begin anew in each sample of a pack."""
    assert packed is not None
    if not packed.resets_positions:
        return cos, sin
    positions = packed.positions(cos.shape[0]).to(cos.device)
    return cos[positions], sin[positions]

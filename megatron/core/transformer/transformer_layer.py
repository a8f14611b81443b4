"""One pre-norm transformer layer.

Shapes: s sequence, b batch, h hidden size, r rotated width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class TransformerLayerSubmodules:
    """What a layer is built of; ``*_bda`` are functions of (training, fused) that return a bias-dropout-add."""

    input_layernorm: ModuleSpec | type = IdentityOp
    self_attention: ModuleSpec | type = IdentityOp
    self_attn_bda: Any = get_bias_dropout_add
    pre_mlp_layernorm: ModuleSpec | type = IdentityOp
    mlp: ModuleSpec | type = IdentityOp
    mlp_bda: Any = get_bias_dropout_add


class TransformerLayer(MegatronModule):
    """x + dropout(attention(norm(x))), then the same with the MLP."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        hidden_dropout: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.hidden_dropout = config.hidden_dropout if hidden_dropout is None else hidden_dropout
        norm = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.input_layernorm = build_module(submodules.input_layernorm, **norm)
        self.self_attention = build_module(
            submodules.self_attention, config=config, layer_number=layer_number, pg_collection=pg_collection
        )
        self.self_attn_bda = build_module(submodules.self_attn_bda)
        self.pre_mlp_layernorm = build_module(submodules.pre_mlp_layernorm, **norm)
        self.mlp = build_module(submodules.mlp, config=config, pg_collection=pg_collection)
        self.mlp_bda = build_module(submodules.mlp_bda)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: torch.Tensor | None = None,
        rotary_pos_cos: torch.Tensor | None = None,
        rotary_pos_sin: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[s, b, h] -> [s, b, h]; the other arguments as in ``SelfAttention.forward``."""
        fused = self.config.bias_dropout_fusion
        attended = self.self_attention(
            self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            rotary_pos_cos=rotary_pos_cos,
            rotary_pos_sin=rotary_pos_sin,
        )
        hidden_states = self.self_attn_bda(self.training, fused)(attended, hidden_states, self.hidden_dropout)
        fed_forward = self.mlp(self.pre_mlp_layernorm(hidden_states))
        output: torch.Tensor = self.mlp_bda(self.training, fused)(fed_forward, hidden_states, self.hidden_dropout)
        return output

"""A layer of a Mamba mixer with its norm: x + dropout(mixer(norm(x))).

Shapes: s sequence, b batch, h hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.layer_arguments import check_layer_arguments
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class MambaLayerSubmodules:
    """The specs of a layer's modules; ``mamba_bda`` is a function of (training, fused) that returns a bias-dropout-add."""

    norm: ModuleSpec | type = IdentityOp
    mixer: ModuleSpec | type = IdentityOp
    mamba_bda: Any = get_bias_dropout_add


class MambaLayer(MegatronModule):
    """A Mamba layer.

    Args:
        layer_number: the layer's number in the whole model, from 1.

    Source: Megatron-Core's class of this name.
    """

    names_in_checkpoint: Mapping[str, str] = {
        f"mixer.in_proj.layer_norm_{kind}": f"norm.{kind}" for kind in ("weight", "bias")
    }
    """Norms that are part of a linear layer are stored as the modules that they are otherwise."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaLayerSubmodules,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config)
        check_layer_arguments("MambaLayer", pp_layer_offset=pp_layer_offset, name=name)
        self.layer_number, self.hidden_dropout = layer_number, config.hidden_dropout
        self.norm = build_module(
            submodules.norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
        )
        self.mixer = build_module(
            submodules.mixer,
            config=config,
            d_model=config.hidden_size,
            layer_number=layer_number,
            pg_collection=pg_collection,
        )
        self.mamba_bda = build_module(submodules.mamba_bda)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: torch.Tensor | None = None,
        rotary_pos_cos: torch.Tensor | None = None,
        rotary_pos_sin: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Run the layer: [s, b, h] -> [s, b, h]; masks and angles are for layers with attention, and without effect."""
        mixed = self.mixer(self.norm(hidden_states), packed_seq_params=packed_seq_params)
        config = self.config
        add = self.mamba_bda(self.training, config.bias_dropout_fusion, compiled=not config.disable_jit_fuser)
        draws = config.sequence_parallel and self.training and self.hidden_dropout > 0.0
        with self.drawing_apart(hidden_states, draws):
            total: torch.Tensor = add(mixed, hidden_states, self.hidden_dropout)
        return total

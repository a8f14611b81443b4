"""The pre-norm transformer layer.

Shapes: s sequence, b batch, h hidden size, r rotated width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.utils.checkpoint import checkpoint, noop_context_fn

from megatron.core.fp8_utils import recomputation_in_fp8
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.layer_arguments import check_layer_arguments
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, has_experts
from megatron.core.transformer.pipeline_layers import get_transformer_layer_offset
from megatron.core.transformer.recomputation import recomputes
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.torch_norm import Norm

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "BaseTransformerLayer",
    "MoETransformerLayer",
    "TransformerLayer",
    "TransformerLayerSubmodules",
    "get_transformer_layer_offset",
]


@dataclass
class TransformerLayerSubmodules:
    """The specs of a layer's modules; ``*_bda`` are functions of (training, fused) that return a bias-dropout-add."""

    input_layernorm: ModuleSpec | type = IdentityOp
    self_attention: ModuleSpec | type = IdentityOp
    self_attn_bda: Any = get_bias_dropout_add
    pre_mlp_layernorm: ModuleSpec | type = IdentityOp
    mlp: ModuleSpec | type = IdentityOp
    mlp_bda: Any = get_bias_dropout_add
    post_self_attn_layernorm: ModuleSpec | type = IdentityOp
    post_mlp_layernorm: ModuleSpec | type = IdentityOp


class BaseTransformerLayer(MegatronModule):
    """A layer of a transformer block, for callers that ask what a module is."""


class TransformerLayer(BaseTransformerLayer):
    """A transformer layer: x + dropout(attention(norm(x))), then the same with the MLP; one of both may be left out.

    Args:
        layer_number: the layer's number in the whole model, from 1.
        hidden_dropout: None: that of the configuration.
        vp_stage, is_mtp_layer, add_layer_offset, pp_layer_offset, name: see ``layer_arguments``.

    Attributes:
        names_in_checkpoint: names of parameters, relative to the layer, and those that they have in checkpoints: norms that
            are part of a linear layer are stored as the modules that they are otherwise.
    """

    names_in_checkpoint: ClassVar[dict[str, str]] = {
        f"{linear}.layer_norm_{kind}": f"{norm}.{kind}"
        for linear, norm in (
            ("self_attention.linear_qkv", "input_layernorm"),
            ("self_attention.in_proj", "input_layernorm"),
            ("mlp.linear_fc1", "pre_mlp_layernorm"),
        )
        for kind in ("weight", "bias")
    }

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        hidden_dropout: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        is_mtp_layer: bool = False,
        add_layer_offset: bool = True,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config)
        config.check_has_width()
        check_layer_arguments(
            "TransformerLayer",
            vp_stage=vp_stage,
            is_mtp_layer=is_mtp_layer,
            add_layer_offset=add_layer_offset,
            pp_layer_offset=pp_layer_offset,
            name=name,
        )
        self.layer_number = layer_number
        self.hidden_dropout = config.hidden_dropout if hidden_dropout is None else hidden_dropout
        norm = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.input_layernorm = build_module(submodules.input_layernorm, **norm)
        self.self_attention = build_module(
            submodules.self_attention, config=config, layer_number=layer_number, pg_collection=pg_collection
        )
        self.has_attention = submodules.self_attention is not IdentityOp
        self.has_mlp = submodules.mlp is not IdentityOp
        self.self_attn_bda = build_module(submodules.self_attn_bda)
        self.pre_mlp_layernorm = build_module(submodules.pre_mlp_layernorm, **norm)
        self.mlp = build_module(submodules.mlp, config=config, pg_collection=pg_collection)
        self.mlp_bda = build_module(submodules.mlp_bda)
        behind = (submodules.post_self_attn_layernorm, submodules.post_mlp_layernorm)
        if {spec is not IdentityOp for spec in behind} != {config.sandwich_layernorm}:
            raise ValueError(
                f"the layer spec must have norms behind attention and MLP where TransformerConfig.sandwich_layernorm"
                f" ({config.sandwich_layernorm}) says so, and none elsewhere; use get_gpt_decoder_block_spec(config)"
            )
        self.post_self_attn_layernorm, self.post_mlp_layernorm = (
            build_module(spec, **norm) if config.sandwich_layernorm else None for spec in behind
        )
        if isinstance(self.mlp, MoELayer):
            # As in Megatron-Core, the numbers of layers of multi-token prediction go on behind the others'.
            self.mlp.set_layer_number(layer_number + is_mtp_layer * config.num_layers)
        if not is_mtp_layer:  # which is as the last layer
            self._check_experts()
        self.recomputes_mlp = recomputes(config, "moe" if isinstance(self.mlp, MoELayer) else "mlp")

    def _check_experts(self) -> None:
        """Raise ValueError where the spec gives the layer experts and the configuration does not, or the reverse."""
        expected, has = has_experts(self.config, self.layer_number), isinstance(self.mlp, MoELayer)
        if has != expected and isinstance(self.mlp, MoELayer | MLP):
            raise ValueError(
                f"layer {self.layer_number} must be {'a mixture of experts' if expected else 'dense'} by"
                f" TransformerConfig.num_moe_experts ({self.config.num_moe_experts}) and moe_layer_freq"
                f" ({self.config.moe_layer_freq}), got a spec with {type(self.mlp).__name__}; use"
                " get_gpt_decoder_block_spec(config)"
            )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: torch.Tensor | None = None,
        rotary_pos_cos: torch.Tensor | None = None,
        rotary_pos_sin: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Run the layer: [s, b, h] -> [s, b, h]; the other arguments as in ``SelfAttention.forward``."""
        if not self.has_attention:
            return self._mlp(*self._normed(self.pre_mlp_layernorm, hidden_states))
        normed, hidden_states = self._normed(self.input_layernorm, hidden_states)
        attended = self.self_attention(
            normed,
            attention_mask=attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            rotary_pos_cos=rotary_pos_cos,
            rotary_pos_sin=rotary_pos_sin,
            **({} if packed_seq_params is None else {"packed_seq_params": packed_seq_params}),
        )
        if self.post_self_attn_layernorm is not None:
            attended = self._normed_behind(self.post_self_attn_layernorm, *attended)
        if not self.has_mlp:
            return self._bias_dropout_add(self.self_attn_bda, attended, hidden_states)
        if self._only_adds(self.self_attn_bda, attended[1]) and isinstance(self.pre_mlp_layernorm, Norm):
            normed, hidden_states = self.pre_mlp_layernorm(attended[0], hidden_states, keep_input=True)
        else:
            hidden_states = self._bias_dropout_add(self.self_attn_bda, attended, hidden_states)
            normed, hidden_states = self._normed(self.pre_mlp_layernorm, hidden_states)
        return self._mlp(normed, hidden_states)

    def _mlp(self, normed: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Add the MLP's output of what is normed to the hidden states [s, b, h]."""
        if self.recomputes_mlp and self.training:
            output = checkpoint(
                self.mlp,
                normed,
                use_reentrant=False,
                preserve_rng_state=self.config.moe_router_force_load_balancing,
                context_fn=noop_context_fn if self.config.fp8 is None else partial(recomputation_in_fp8, [self.mlp]),
            )
        else:
            output = self.mlp(normed)
        if self.post_mlp_layernorm is not None:
            output = self._normed_behind(self.post_mlp_layernorm, *output)
        return self._bias_dropout_add(self.mlp_bda, output, hidden_states)

    def _normed(self, norm: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of x, and x for the residual sum; where the norm can, its backward adds both gradients."""
        if isinstance(norm, Norm):
            normed, x = norm(x, keep_input=True)
            return normed, x
        return norm(x), x

    def _normed_behind(
        self, norm: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, None]:
        """Return the norm of what a part of the layer gave, with its bias, which is no longer to be added."""
        return norm(x if bias is None else x + bias), None

    def _bias_dropout_add(
        self, build: Any, x_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor
    ) -> torch.Tensor:
        config = self.config
        if build is get_bias_dropout_add:
            add = build(self.training, config.bias_dropout_fusion, compiled=not config.disable_jit_fuser)
        else:
            add = build(self.training, config.bias_dropout_fusion)
        # With sequence parallelism each tensor-parallel rank has its own part of the hidden states, so it draws its own dropout.
        draws = config.sequence_parallel and self.training and self.hidden_dropout > 0.0
        with self.drawing_apart(residual, draws):
            total: torch.Tensor = add(x_with_bias, residual, self.hidden_dropout)
        return total

    def _only_adds(self, build: Any, bias: torch.Tensor | None) -> bool:
        """Return whether bias-dropout-add is a plain sum here, which the next norm can compute in its own kernel."""
        dropping = self.training and self.hidden_dropout > 0.0
        return self.config.bias_dropout_fusion and build is get_bias_dropout_add and bias is None and not dropping


MoETransformerLayer = TransformerLayer
"""Megatron-Core's name of a layer with experts; the spec defines the layer's parts."""

"""The specs of GPT layers."""

from __future__ import annotations

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


def get_gpt_layer_local_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool | None = False,
    qk_layernorm: bool | None = False,
    multi_latent_attention: bool | None = False,
    fp8: str | None = None,
    normalization: str | None = None,
    qk_l2_norm: bool | None = False,
    use_kitchen: bool = False,
) -> ModuleSpec:
    """The spec of a dense GPT layer of this framework's own modules.

    Args:
        qk_layernorm: queries and keys are normalised; must equal ``TransformerConfig.qk_layernorm``.
        normalization: must equal ``TransformerConfig.normalization``; None follows it.

    Raises:
        NotImplementedError: an argument asks for a layer that is not served, by name.
        ValueError: ``normalization`` is unknown.
    """
    not_served = {
        "num_experts": num_experts,
        "moe_grouped_gemm": moe_grouped_gemm,
        "multi_latent_attention": multi_latent_attention,
        "fp8": fp8,
        "qk_l2_norm": qk_l2_norm,
        "use_kitchen": use_kitchen,
    }
    for name, value in not_served.items():
        if value:
            raise NotImplementedError(
                f"get_gpt_layer_local_spec({name}=...) is not served, got {value!r}; leave it out"
            )
    if normalization not in (None, "LayerNorm", "RMSNorm"):
        raise ValueError(f"normalization must be 'LayerNorm', 'RMSNorm' or None, got {normalization!r}")
    norm = ModuleSpec(module=WrappedTorchNorm, params={"normalization": normalization})
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=DotProductAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=norm if qk_layernorm else IdentityOp,
        k_layernorm=norm if qk_layernorm else IdentityOp,
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=ModuleSpec(
                module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def get_gpt_layer_with_transformer_engine_spec(*args: object, **kwargs: object) -> ModuleSpec:
    """Always refused: layers of transformer-engine are not served.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "transformer-engine layers are not served; use get_gpt_layer_local_spec(), which loads the same weights except"
        " that norms are modules of their own (input_layernorm, pre_mlp_layernorm)"
    )

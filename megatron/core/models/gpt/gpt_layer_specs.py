"""Layer specs of GPT models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules, has_experts
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


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
    """Return the spec of a GPT layer of this framework's own modules.

    Args:
        num_experts: number of experts of the layer, which must equal ``TransformerConfig.num_moe_experts``; None: dense.
        moe_grouped_gemm: as ``TransformerConfig.moe_grouped_gemm``.
        qk_layernorm: normalise queries and keys; must equal ``TransformerConfig.qk_layernorm``.
        normalization: must equal ``TransformerConfig.normalization``; None: that of the configuration.

    Raises:
        NotImplementedError: an argument asks for a layer that is not served; the message names it.
        ValueError: ``normalization`` is unknown, or ``moe_grouped_gemm`` is set without experts.
    """
    not_served = {
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
            mlp=_mlp_spec(num_experts, bool(moe_grouped_gemm)),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _mlp_spec(num_experts: int | None, moe_grouped_gemm: bool) -> ModuleSpec:
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    if num_experts is None:
        if moe_grouped_gemm:
            raise ValueError("moe_grouped_gemm must go with num_experts, got None; leave it out or set num_experts")
        return ModuleSpec(module=MLP, submodules=linears)
    experts = GroupedMLP if moe_grouped_gemm else SequentialMLP
    return ModuleSpec(
        module=MoELayer,
        params={"num_experts": num_experts},
        submodules=MoESubmodules(
            experts=ModuleSpec(module=experts, submodules=linears),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=linears),
        ),
    )


def get_gpt_decoder_block_spec(
    config: TransformerConfig, use_transformer_engine: bool = False, normalization: str | None = None
) -> TransformerBlockSubmodules:
    """Return the specs of all layers of a model, with experts where ``moe_layer_freq`` says so, and of the final norm.

    A pipeline stage builds its own layers of them.

    Args:
        normalization: as for ``get_gpt_layer_local_spec``.

    Raises:
        NotImplementedError: ``use_transformer_engine`` is set.
    """
    if use_transformer_engine:
        get_gpt_layer_with_transformer_engine_spec()
    norms = {"qk_layernorm": config.qk_layernorm, "normalization": normalization or config.normalization}
    spec: Callable[..., ModuleSpec] = partial(get_gpt_layer_local_spec, **norms)  # type: ignore[arg-type]
    dense = spec()
    with_experts = spec(config.num_moe_experts, config.moe_grouped_gemm) if config.num_moe_experts else dense
    specs = [with_experts if has_experts(config, number) else dense for number in range(1, config.num_layers + 1)]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=WrappedTorchNorm)


def get_gpt_layer_with_transformer_engine_spec(*args: object, **kwargs: object) -> ModuleSpec:
    """Raise NotImplementedError: layers of transformer-engine are not served."""
    raise NotImplementedError(
        "transformer-engine layers are not served; use get_gpt_layer_local_spec(), which loads the same weights except"
        " that norms are separate modules (input_layernorm, pre_mlp_layernorm)"
    )

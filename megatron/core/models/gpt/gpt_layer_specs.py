"""Layer specs of GPT models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron.core.extensions import why_missing
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, WholeLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.attention_patterns import is_linear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.hybrid_layers import ATTENTION, EXPERTS, MAMBA, kind_of_layer
from megatron.core.transformer.hybrid_layers import MLP as MLP_ALONE
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules, has_experts
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules, get_mtp_layer_spec
from megatron.core.transformer.pipeline_layers import get_mtp_num_layers_to_build
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm, WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class _Modules:
    """The classes of one implementation of the layers."""

    norm: ModuleSpec | type
    column: type
    row: type
    core_attention: type
    experts: ModuleSpec | type
    """Experts with one grouped kernel for each layer."""
    experts_one_by_one: ModuleSpec | type
    whole: type
    """A linear layer that is whole on each tensor-parallel rank."""
    mlp: type = MLP
    norm_and_column: type | None = None
    """The norm and the column-parallel layer behind it in one module; None: two modules."""


def get_gpt_layer_local_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool | None = False,
    qk_layernorm: bool | None = False,
    multi_latent_attention: bool | None = False,
    fp8: str | None = None,
    normalization: str | None = None,
    qk_l2_norm: bool | None = False,
    use_kitchen: bool = False,
    *,
    sandwich_layernorm: bool = False,
    linear_attention: bool = False,
) -> ModuleSpec:
    """Return the spec of a GPT layer of this framework's own modules.

    Args:
        num_experts: number of experts of the layer, which must equal ``TransformerConfig.num_moe_experts``; None: dense.
        moe_grouped_gemm: as ``TransformerConfig.moe_grouped_gemm``.
        qk_layernorm: normalise queries and keys (with multi-latent attention, the latent vectors); must equal
            ``TransformerConfig.qk_layernorm``.
        qk_l2_norm: normalise queries and keys without weights; must equal ``TransformerConfig.qk_l2_norm``.
        sandwich_layernorm: norms behind attention and MLP; must equal ``TransformerConfig.sandwich_layernorm``.
        linear_attention: attention is ``GatedDeltaNet``, whatever the other arguments say of it.
        multi_latent_attention: attention is ``MLASelfAttention``, which needs an ``MLATransformerConfig``.
        normalization: must equal ``TransformerConfig.normalization``; None: that of the configuration.

    Raises:
        NotImplementedError: an argument asks for a layer that is not served; the message names it.
        ValueError: ``normalization`` is unknown, or ``moe_grouped_gemm`` is set without experts.
    """
    _refuse(
        "get_gpt_layer_local_spec",
        qk_l2_norm=qk_l2_norm and multi_latent_attention,
        fp8=fp8,
        use_kitchen=use_kitchen,
    )
    if normalization not in (None, "LayerNorm", "RMSNorm"):
        raise ValueError(f"normalization must be 'LayerNorm', 'RMSNorm' or None, got {normalization!r}")
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    modules = _Modules(
        norm=ModuleSpec(module=WrappedTorchNorm, params={"normalization": normalization}),
        column=ColumnParallelLinear,
        row=RowParallelLinear,
        whole=WholeLinear,
        core_attention=DotProductAttention,
        experts=ModuleSpec(module=GroupedMLP, submodules=linears),
        experts_one_by_one=ModuleSpec(module=SequentialMLP, submodules=linears),
    )
    attention = _attention(
        modules,
        linear=linear_attention,
        latent=bool(multi_latent_attention),
        qk_layernorm=bool(qk_layernorm),
        qk_l2_norm=bool(qk_l2_norm),
    )
    return _layer_spec(modules, attention, num_experts, bool(moe_grouped_gemm), sandwich=sandwich_layernorm)


def get_gpt_layer_with_transformer_engine_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool | None = False,
    qk_layernorm: bool | None = False,
    multi_latent_attention: bool | None = False,
    fp8: str | None = None,
    qk_l2_norm: bool | None = False,
    use_te_op_fuser: bool | None = False,
    use_kitchen: bool = False,
    use_te_activation_func: bool = False,
    use_kitchen_attention: bool = False,
    kitchen_attention_backend: str = "sdpa",
    mla_down_proj_fusion: bool = False,
    use_grouped_gemm_for_dense_mlp: bool = False,
    *,
    sandwich_layernorm: bool = False,
    linear_attention: bool = False,
) -> ModuleSpec:
    """Return the spec of a GPT layer of transformer-engine's modules, which can multiply in FP8.

    Its parameters start as those of ``get_gpt_layer_local_spec``, and checkpoints of either load under the other. Norms are
    parts of the linear layers behind them (``linear_qkv.layer_norm_weight``).

    Args:
        num_experts, moe_grouped_gemm, qk_layernorm, qk_l2_norm, multi_latent_attention, sandwich_layernorm, linear_attention:
            as for ``get_gpt_layer_local_spec``.
        mla_down_proj_fusion: accepted for Megatron-Core's callers: the down-projections are two products, which give the same.
        fp8: accepted for Megatron-Core's callers; ``TransformerConfig.fp8`` is what counts.
        use_te_op_fuser: the MLP of a dense layer is ``TEFusedMLP``; must equal
            ``TransformerConfig.use_transformer_engine_op_fuser``.

    Raises:
        ImportError: transformer-engine cannot be used; gives the reason.
        NotImplementedError: an argument asks for a layer that is not served; the message names it.
        ValueError: ``moe_grouped_gemm`` is set without experts.

    Source: Megatron-Core's function of this name.
    """
    _refuse(
        "get_gpt_layer_with_transformer_engine_spec",
        qk_l2_norm=qk_l2_norm and multi_latent_attention,
        use_te_op_fuser=use_te_op_fuser and num_experts is not None,
        use_kitchen=use_kitchen,
        use_te_activation_func=use_te_activation_func,
        use_kitchen_attention=use_kitchen_attention,
        use_grouped_gemm_for_dense_mlp=use_grouped_gemm_for_dense_mlp,
    )
    reason = why_missing("transformer_engine_layers")
    if reason is not None:
        raise ImportError(
            f"layers of transformer-engine need that package: {reason}; install it (docs/transformer_engine.md), or use"
            " get_gpt_layer_local_spec(), which computes the same and loads the same checkpoints"
        )
    from megatron.core.extensions import transformer_engine_layers as te
    from megatron.core.extensions.transformer_engine_mlp import TEFusedMLP

    grouped = MLPSubmodules(linear_fc1=te.TEColumnParallelGroupedLinear, linear_fc2=te.TERowParallelGroupedLinear)
    linears = MLPSubmodules(linear_fc1=te.TEColumnParallelLinear, linear_fc2=te.TERowParallelLinear)
    modules = _Modules(
        norm=te.TENorm,
        column=te.TEColumnParallelLinear,
        row=te.TERowParallelLinear,
        whole=te.TELinear,
        core_attention=te.TEDotProductAttention,
        experts=ModuleSpec(module=TEGroupedMLP, submodules=grouped),
        experts_one_by_one=ModuleSpec(module=SequentialMLP, submodules=linears),
        mlp=TEFusedMLP if use_te_op_fuser else MLP,
        norm_and_column=te.TELayerNormColumnParallelLinear,
    )
    attention = _attention(
        modules,
        linear=linear_attention,
        latent=bool(multi_latent_attention),
        qk_layernorm=bool(qk_layernorm),
        qk_l2_norm=bool(qk_l2_norm),
    )
    return _layer_spec(modules, attention, num_experts, bool(moe_grouped_gemm), sandwich=sandwich_layernorm)


def _refuse(function: str, **not_served: object) -> None:
    for name, value in not_served.items():
        if value:
            raise NotImplementedError(f"{function}({name}=...) is not served, got {value!r}; leave it out")


def _attention(modules: _Modules, *, linear: bool, latent: bool, qk_layernorm: bool, qk_l2_norm: bool) -> ModuleSpec:
    if linear:
        return _linear_attention(modules)
    if latent:
        return _latent_attention(modules, qk_layernorm)
    norm = L2Norm if qk_l2_norm else modules.norm if qk_layernorm else IdentityOp
    submodules = SelfAttentionSubmodules(
        linear_qkv=modules.norm_and_column or modules.column,
        core_attention=modules.core_attention,
        linear_proj=modules.row,
        q_layernorm=norm,
        k_layernorm=norm,
    )
    return ModuleSpec(module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules)


def _linear_attention(modules: _Modules) -> ModuleSpec:
    submodules = GatedDeltaNetSubmodules(
        in_proj=modules.norm_and_column or modules.column, out_norm=modules.norm, out_proj=modules.row
    )
    return ModuleSpec(module=GatedDeltaNet, submodules=submodules)


def _latent_attention(modules: _Modules, qk_layernorm: bool) -> ModuleSpec:
    fuses = qk_layernorm and modules.norm_and_column is not None
    norm = modules.norm if qk_layernorm and not fuses else IdentityOp
    up = modules.norm_and_column if fuses else modules.column
    submodules = MLASelfAttentionSubmodules(
        linear_q_proj=modules.column,
        linear_q_down_proj=modules.whole,
        linear_q_up_proj=up,
        linear_kv_down_proj=modules.whole,
        linear_kv_up_proj=up,
        core_attention=modules.core_attention,
        linear_proj=modules.row,
        q_layernorm=norm,
        kv_layernorm=norm,
    )
    return ModuleSpec(module=MLASelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules)


def _layer_spec(
    modules: _Modules,
    attention: ModuleSpec,
    num_experts: int | None,
    moe_grouped_gemm: bool,
    *,
    sandwich: bool,
) -> ModuleSpec:
    norm_behind = modules.norm if sandwich else IdentityOp
    # Latent vectors are projected by two layers, so the norm before them is a module of its own.
    fuses_norm = modules.norm_and_column is not None and attention.module in (SelfAttention, GatedDeltaNet)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=IdentityOp if fuses_norm else modules.norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            # The router and the shared expert read what is normalised, too.
            pre_mlp_layernorm=IdentityOp if modules.norm_and_column and num_experts is None else modules.norm,
            mlp=_mlp_spec(modules, num_experts, moe_grouped_gemm),
            mlp_bda=get_bias_dropout_add,
            post_self_attn_layernorm=norm_behind,
            post_mlp_layernorm=norm_behind,
        ),
    )


def _mlp_spec(modules: _Modules, num_experts: int | None, moe_grouped_gemm: bool) -> ModuleSpec:
    if num_experts is None:
        if moe_grouped_gemm:
            raise ValueError("moe_grouped_gemm must go with num_experts, got None; leave it out or set num_experts")
        dense = MLPSubmodules(linear_fc1=modules.norm_and_column or modules.column, linear_fc2=modules.row)
        return ModuleSpec(module=modules.mlp, submodules=dense)
    shared = MLPSubmodules(linear_fc1=modules.column, linear_fc2=modules.row)
    return ModuleSpec(
        module=MoELayer,
        params={"num_experts": num_experts},
        submodules=MoESubmodules(
            experts=modules.experts if moe_grouped_gemm else modules.experts_one_by_one,
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=shared),
            latent_projection=modules.whole,
        ),
    )


def get_gpt_layer_local_submodules(*arguments: Any, **further: Any) -> TransformerLayerSubmodules:
    """Return the submodules of the layer of ``get_gpt_layer_local_spec``, whose arguments these are."""
    submodules: TransformerLayerSubmodules = get_gpt_layer_local_spec(*arguments, **further).submodules
    return submodules


def get_gpt_layer_with_transformer_engine_submodules(*arguments: Any, **further: Any) -> TransformerLayerSubmodules:
    """Return the submodules of the layer of ``get_gpt_layer_with_transformer_engine_spec``, whose arguments these are.

    Raises:
        ImportError: transformer-engine cannot be used; gives the reason.
    """
    submodules: TransformerLayerSubmodules = get_gpt_layer_with_transformer_engine_spec(
        *arguments, **further
    ).submodules
    return submodules


def get_gpt_decoder_block_spec(
    config: TransformerConfig,
    use_transformer_engine: bool = False,
    normalization: str | None = None,
    qk_l2_norm: bool = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> TransformerBlockSubmodules:
    """Return the specs of all layers of a model, with experts where ``moe_layer_freq`` says so, and of the final norm.

    A pipeline stage builds its own layers of them, so ``vp_stage`` and ``pp_rank`` have no effect.

    Args:
        use_transformer_engine: layers are those of ``get_gpt_layer_with_transformer_engine_spec``.
        normalization: as for ``get_gpt_layer_local_spec``; without effect on layers of transformer-engine, which have that
            of the configuration.
        qk_l2_norm: as for ``get_gpt_layer_local_spec``; also on where the configuration has it.

    Raises:
        ImportError: transformer-engine cannot be used; gives the reason.
    """
    spec: Callable[..., ModuleSpec]
    settings: dict[str, Any] = {
        "qk_layernorm": config.qk_layernorm,
        "qk_l2_norm": qk_l2_norm or config.qk_l2_norm,
        "multi_latent_attention": config.multi_latent_attention,
        "sandwich_layernorm": config.sandwich_layernorm,
    }
    if use_transformer_engine:
        spec = get_gpt_layer_with_transformer_engine_spec
        settings["use_te_op_fuser"] = config.use_transformer_engine_op_fuser
    else:
        spec, settings["normalization"] = get_gpt_layer_local_spec, normalization or config.normalization
    if config.hybrid_layer_pattern is not None:
        return _hybrid_block(config, spec, settings, use_transformer_engine)
    kinds = [(has_experts(config, n), is_linear(config, n)) for n in range(1, config.num_layers + 1)]
    layers: dict[tuple[bool, bool], ModuleSpec] = {}
    for kind in dict.fromkeys(kinds):
        with_experts, linear = kind
        experts = (config.num_moe_experts, config.moe_grouped_gemm) if with_experts else ()
        layers[kind] = spec(*experts, **settings, linear_attention=linear)
    specs = [layers[kind] for kind in kinds]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=_final_norm(use_transformer_engine))


def _hybrid_block(
    config: TransformerConfig, spec: Callable[..., ModuleSpec], settings: dict[str, Any], use_transformer_engine: bool
) -> TransformerBlockSubmodules:
    """Return the specs of a hybrid model: layers of attention alone, of an MLP alone, and of Mamba with the same linear modules."""
    both = spec(**settings)
    experts = both
    if config.num_moe_experts is not None:
        experts = spec(config.num_moe_experts, config.moe_grouped_gemm, **settings)
    attention, submodules = both.submodules.self_attention, both.submodules
    mixer = MambaMixerSubmodules(in_proj=attention.submodules.linear_qkv, out_proj=attention.submodules.linear_proj)
    alone = {"input_layernorm": IdentityOp, "self_attention": IdentityOp}
    kinds = {
        MAMBA: ModuleSpec(
            module=MambaLayer,
            submodules=MambaLayerSubmodules(
                norm=submodules.input_layernorm, mixer=ModuleSpec(module=MambaMixer, submodules=mixer)
            ),
        ),
        ATTENTION: _replaced(both, mlp=IdentityOp, pre_mlp_layernorm=IdentityOp),
        MLP_ALONE: _replaced(both, **alone),
        EXPERTS: _replaced(experts, **alone),
    }
    specs = [kinds[kind_of_layer(config, number) or ""] for number in range(1, config.num_layers + 1)]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=_final_norm(use_transformer_engine))


def _replaced(layer: ModuleSpec, **submodules: Any) -> ModuleSpec:
    return replace(layer, submodules=replace(layer.submodules, **submodules))


def get_gpt_decoder_layer_specs(
    config: TransformerConfig,
    use_transformer_engine: bool,
    normalization: str | None = None,
    qk_l2_norm: bool = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> list[ModuleSpec]:
    """Return the specs of all layers of a model; arguments are those of ``get_gpt_decoder_block_spec``."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine, normalization, qk_l2_norm, vp_stage, pp_rank)
    return list(block.layer_specs or ())


def get_gpt_mtp_block_spec(
    config: TransformerConfig,
    spec: TransformerBlockSubmodules | ModuleSpec,
    use_transformer_engine: bool,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> MultiTokenPredictionBlockSubmodules | None:
    """Return the specs of the layers of multi-token prediction; None where a stage has none.

    Args:
        spec: of the model's layers, whose last one is that of these, or of one layer.
        vp_stage, pp_rank: the stage; None: of all of a model, and this rank's.
    """
    if not get_mtp_num_layers_to_build(config, vp_stage, pp_rank):
        return None
    layer = (spec.layer_specs or [])[-1] if isinstance(spec, TransformerBlockSubmodules) else spec
    number = 1 if config.mtp_use_repeated_layer else config.mtp_num_layers or 0
    return MultiTokenPredictionBlockSubmodules([get_mtp_layer_spec(layer, use_transformer_engine)] * number)


def _final_norm(use_transformer_engine: bool) -> Any:
    if not use_transformer_engine:
        return WrappedTorchNorm
    from megatron.core.extensions.transformer_engine_layers import TENorm

    return TENorm

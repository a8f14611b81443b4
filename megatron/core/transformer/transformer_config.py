"""The configuration of a transformer, with Megatron-Core's field names and defaults; settings not served are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F

from megatron.core.activations import ACTIVATIONS
from megatron.core.checked_config import megatron_dataclass
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.served_arguments import ANY
from megatron.core.substitutions import Substitution
from megatron.core.transformer.config_checks import FAMILIES, NOT_SERVED, contradictions
from megatron.core.transformer.config_substitutions import SUBSTITUTIONS
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.init_methods import ConfigInit, InheritedInit, InitMethod
from megatron.core.transformer.mla_checks import MLA_CONTRADICTIONS
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.upstream_fields import UPSTREAM_FIELDS


@megatron_dataclass(UPSTREAM_FIELDS["TransformerConfig"], special=NOT_SERVED, families=FAMILIES)
class TransformerConfig(ModelParallelConfig):
    """The settings of a transformer: its shape, numerics and experts; ``ModelParallelConfig`` has those of its split.

    Fields of Megatron-Core that are not below are accepted at their default, and refused otherwise (``config_checks.py``).
    What is set later is checked, but a model that is built does not follow it.

    Raises:
        ValueError: a field is out of range or contradicts another.
        NotImplementedError: a field asks for something that is not served; the message names it and says why.

    Source: the names, meanings and defaults of Megatron-Core's TransformerConfig, except where a field says otherwise.
    """

    substitutions: ClassVar[tuple[Substitution, ...]] = SUBSTITUTIONS

    num_layers: int = 0
    """Transformer layers."""
    num_layers_in_first_pipeline_stage: int | None = None
    """Layers of the first pipeline rank; None: as many as on ranks in the middle."""
    num_layers_in_last_pipeline_stage: int | None = None
    """Layers of the last pipeline rank; None: as many as on ranks in the middle."""
    pipeline_model_parallel_layout: Any = None
    """The layers of all stages, as a string or lists: see ``PipelineParallelLayerLayout``, which it becomes. None: as the other
    fields say."""
    account_for_embedding_in_pipeline_split: bool = False
    """The embedding counts as a layer: the first stage has one fewer than others."""
    account_for_loss_in_pipeline_split: bool = False
    """The output layer counts as a layer: the last stage has one fewer than others."""
    mtp_num_layers: int | None = None
    """Layers of multi-token prediction, each of which predicts a token further on; None: there are none."""
    mtp_loss_scaling_factor: float = 0.1
    """Weight of the mean of their losses, beside the main loss."""
    mtp_use_repeated_layer: bool = False
    """One layer is applied ``mtp_num_layers`` times, instead of as many layers."""
    hidden_size: int = 0
    """Width of the residual stream; 0 where modules that are no transformer are wrapped: layers need at least 1."""
    num_attention_heads: int = 0
    """Query heads of each layer."""
    num_query_groups: int | None = None
    """Key and value heads of each layer; None: as many as query heads."""
    ffn_hidden_size: int | None = None
    """Width between the two linear layers of the MLP; None: 4 * hidden_size."""
    kv_channels: int | None = None
    """Width of one head; None: hidden_size // num_attention_heads."""
    hidden_dropout: float = 0.1
    """Probability of dropping an element of the embedding's and each sublayer's output, in training."""
    attention_dropout: float = 0.1
    """Probability of dropping an attention probability, in training."""
    attention_backend: AttnBackend | str = AttnBackend.auto
    """Kernels of attention without a mask: torch's choice (auto), on CUDA the flash or the cuDNN kernel alone (flash,
    fused), or all scores in memory (unfused, local)."""
    fp32_residual_connection: bool = False
    """The residual stream stays in fp32 whatever ``params_dtype`` is."""
    layernorm_epsilon: float = 1e-5
    """Added to the variance (or mean square) in every norm."""
    layernorm_zero_centered_gamma: bool = False
    """Norm weights are stored as weight - 1."""
    add_bias_linear: bool = True
    """All linear layers but the output layer have a bias."""
    add_qkv_bias: bool = False
    """The query-key-value projection has a bias even where ``add_bias_linear`` is off."""
    gated_linear_unit: bool = False
    """The MLP is activation(gate) * up, with gate and up fused in ``linear_fc1`` in this order."""
    activation_func: Callable[[torch.Tensor], torch.Tensor] | str = F.gelu
    """The MLP's activation: a function, or one of the names in ``ACTIVATIONS``. F.gelu is the exact (erf) form."""
    glu_linear_offset: float = 0.0
    """With ``gated_linear_unit``, what is gated is (up + this)."""
    activation_func_clamp_value: float | None = None
    """With ``gated_linear_unit``, gates are at most this before the activation, and ups between this and its negative."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """The norm of every normalisation layer."""
    qk_layernorm: bool = False
    """Queries and keys are normalised per head; the layer spec must be asked for it too."""
    multi_latent_attention: bool = False
    """Queries, keys and values are made from latent vectors: use ``MLATransformerConfig``, where it is True."""
    rotary_interleaved: bool = False
    """Rotary embedding rotates pairs (0, 1), (2, 3), ... instead of pairs of the first and the second half."""
    softmax_scale: float | None = None
    """Factor on query-key products; None: 1 / sqrt(kv_channels)."""
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    """The softmax of scores has no further term ("vanilla"), or one more score in each row that gives no value (a sink): 0
    ("off-by-one"), or one learned by each head ("learnable")."""
    window_size: tuple[int, int] | list[int] | None = None
    """A query sees so many positions before its own (-1: all), and so many behind it, which must be 0 (or -1, which means
    the same under the causal mask). None: all before."""
    window_attn_skip_freq: int | list[int] | None = None
    """Layers without a window: every n-th, or [num_layers] of 1 (window) and 0 (none). None: no layer."""
    qk_l2_norm: bool = False
    """Queries and keys are divided by their root mean square, without weights (Llama 4); the layer spec must be asked for it
    too."""
    no_rope_freq: int | list[int] | None = None
    """Layers without rotary positions: every n-th, or [num_layers] of 1 (none) and 0 (rotated). None: no layer."""
    window_rotary_base: float | None = None
    """Ours: base of the rotary frequencies of layers with a window, which are not scaled (Gemma-3); None: that of the others."""
    sandwich_layernorm: bool = False
    """Ours: outputs of attention and MLP are normalised before they are added to the residual stream (Gemma-2 and 3)."""
    embedding_scale: float | None = None
    """Ours: factor on embeddings (Gemma); None: none."""
    yarn_rotary_scaling_factor: float = 1.0
    """Ours, as those below: Megatron-Core sets them on the object. With ``position_embedding_type="yarn"`` of GPTModel, how
    many times longer contexts are than in the first training."""
    yarn_original_max_position_embeddings: int = 4096
    """With "yarn", the longest context of the first training."""
    yarn_beta_fast: float = 32.0
    """With "yarn", turns within that context from which on a channel's frequency stays."""
    yarn_beta_slow: float = 1.0
    """With "yarn", turns within that context up to which a channel's frequency is divided by the scaling factor."""
    yarn_mscale: float | None = 1.0
    """With "yarn", see ``YarnRotaryEmbedding``."""
    yarn_mscale_all_dim: float | None = 0.0
    """With "yarn", see ``YarnRotaryEmbedding``."""
    yarn_correction_range_round_to_int: bool = True
    """With "yarn", the bounds between which channels are blended are whole channels."""
    attention_output_gate: bool = False
    """What attention gives is multiplied by the sigmoid of a gate for each channel, which the query-key-value projection
    computes too."""

    experimental_attention_variant: Literal["gdn", "gated_delta_net"] | None = None
    """Attention of the layers that ``linear_attention_freq`` names: "gdn" (or, in older code, "gated_delta_net") is
    ``GatedDeltaNet``, whose fields are those below. None: all layers attend to all tokens."""
    linear_attention_freq: int | list[int] | None = None
    """Layers with linear attention: all but every n-th, or [num_layers] of 1 (linear) and 0 (not)."""
    linear_conv_kernel_dim: int = 4
    """Tokens that its convolution sees, with the current one."""
    linear_key_head_dim: int = 128
    """Width of its query and key heads."""
    linear_value_head_dim: int = 128
    """Width of its value heads."""
    linear_num_key_heads: int = 16
    """Its query heads, and as many key heads."""
    linear_num_value_heads: int = 32
    """Its value heads, each with a state; a multiple of the key heads."""

    hybrid_layer_pattern: str | None = None
    """Ours (Megatron-Core gives it to the model): a letter for each layer, M (Mamba-2), * (attention), - (MLP) or E (experts),
    each with a norm and a residual of its own, and | between pipeline stages. None: layers of attention and MLP."""
    is_hybrid_model: bool = False
    """The model has the layers of a pattern, which ``HybridModel`` may be given. Last linear layers start with a standard
    deviation of init_method_std / sqrt(num_layers), as where ``hybrid_layer_pattern`` is given: each layer is one sublayer."""
    mamba_state_dim: int = 128
    """Width of the states of Mamba-2."""
    mamba_head_dim: int = 64
    """Width of its heads."""
    mamba_num_groups: int = 8
    """Its groups of heads, which write to and read their states alike."""
    mamba_num_heads: int | None = None
    """Its heads; None: 2 * hidden_size / mamba_head_dim."""

    use_mup: bool = False
    """Maximal update parametrisation: initial weights, attention, logits and the rates of hidden matrices scale with the
    width, so that a learning rate holds for all widths (arXiv:2203.03466)."""
    mup_width_mult: float = 1.0
    """Derived with ``use_mup``: hidden_size / mup_base_hidden_size."""
    mup_base_hidden_size: int | None = None
    """Width at which rates were found; None: hidden_size."""
    mup_embedding_mult: float = 1.0
    """Factor on embeddings."""
    mup_output_mult: float = 1.0
    """Factor on logits; 1: 1 / mup_width_mult."""
    mup_base_head_dim: float | None = None
    """Head width at which scores have their usual scale; None: 1."""
    mup_attn_scale_power: float = 1.0
    """Query-key products are divided by kv_channels to this power."""

    init_method: InitMethod | None = None
    """Initialises embedding, output, query-key-value and first MLP weights; None: normal(0, init_method_std)."""
    output_layer_init_method: InitMethod | None = None
    """Initialises the last linear layer of attention and MLP; None: normal(0, init_method_std / sqrt(2 * num_layers))."""
    embedding_init_method: InitMethod | None = None
    """Initialises the embeddings; None: as ``init_method``."""
    init_method_std: float = 0.02
    """Standard deviation of the default initial weights."""
    embedding_init_method_std: float | None = None
    """Standard deviation of the embeddings' default initial weights, which have no weight decay then (arXiv:2312.16903); None:
    as ``init_method_std``, with decay."""

    apply_query_key_layer_scaling: bool = False
    """Query-key products are divided by the layer's number, and multiplied back in the fp32 softmax."""
    attention_softmax_in_fp32: bool = True
    """The unfused attention computes its softmax in fp32. Fused attention always does."""
    calculate_per_token_loss: bool = False
    """The training loop scales gradients by the number of tokens; the model computes the same either way."""
    init_model_with_meta_device: bool = False
    """The training loop builds the model on the meta device; the model's values are the same either way."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute in backward: whole layers ("full"), ``recompute_modules`` ("selective"), or nothing (None)."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With "full": all layers in chunks of ``recompute_num_layers`` ("uniform"), or the first so many layers ("block")."""
    recompute_num_layers: int | None = None
    """Layers of a chunk ("uniform"), or number of layers that are recomputed ("block")."""
    recompute_modules: tuple[str, ...] | list[str] | None = None
    """What "selective" recomputes: the core of attention ("core_attn"), the up-projections of
    multi-latent attention ("mla_up_proj"), the MLP's activation ("mlp_act", ours), dense MLPs
    ("mlp"), mixtures of experts ("moe"), or several of them; None: ["core_attn"]."""

    bias_activation_fusion: bool = False
    """Bias and activation are one function in forward and one in backward, which keep only the input. As in
    Megatron-Core, GELU is then the tanh form. Like the fusions below it is compiled on CUDA (see DESIGN.md); off,
    PyTorch's own kernels run."""
    bias_dropout_fusion: bool = False
    """Bias, dropout and residual are one fused function; it draws other random numbers than PyTorch's dropout."""
    masked_softmax_fusion: bool = False
    """Scale, mask and fp32 softmax are one fused function, where scores are in memory (with a mask, or
    ``attention_backend`` unfused or local). It has no effect on attention by PyTorch's fused kernels."""
    apply_rope_fusion: bool = False
    """The split of the query-key-value projection and the rotation of queries and keys are one fused function."""
    persist_layer_norm: bool = False
    """Norms are one kernel in forward and one in backward, which include the residual sum before the norm and the sum of
    its gradients; off, PyTorch's norm kernels and separate sums run."""
    disable_jit_fuser: bool = False
    """Fused functions run uncompiled, as plain PyTorch, on CUDA too. Ours: in Megatron-LM it is a switch of the whole
    process."""

    layer_kernels: Literal["fastest", "transformer_engine"] = "fastest"
    """What layers of transformer-engine take for what does not multiply in FP8: this framework's own kernels where they were
    measured to be faster (grouped experts in bf16), or transformer-engine's everywhere."""
    fp8: Literal["e4m3", "hybrid"] | None = None
    """Layers of transformer-engine multiply in FP8: all tensors in E4M3 ("e4m3"), or gradients of outputs in E5M2
    ("hybrid"); None: in ``params_dtype``. The model's layers must be transformer-engine's then."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise"] = "delayed"
    """Where the scales of FP8 tensors come from: earlier steps ("delayed"), the tensor itself ("tensorwise"), or its blocks
    ("blockwise"). "mxfp8", which needs Blackwell, and "custom" are refused."""
    fp8_margin: int = 0
    """With "delayed", scales are divided by 2 to this power."""
    fp8_amax_history_len: int = 1
    """With "delayed", steps whose largest absolute values are kept."""
    fp8_amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    """With "delayed", the largest absolute value that the scale is made for: the last step's, or the largest of all kept."""
    fp8_wgrad: bool = True
    """Weight gradients are computed in FP8. False is refused."""
    fp8_dot_product_attention: bool = False
    """Core attention multiplies in FP8."""
    fp8_multi_head_attention: bool = False
    """Core attention's output stays in FP8 for the projection behind it; goes with ``fp8_dot_product_attention``."""
    fp8_param: bool = False
    """Weights of layers that multiply in FP8 rest and travel in it too, under the sharding engine."""
    tp_only_amax_red: bool = False
    """With "delayed", largest absolute values are reduced over tensor- and context-parallel ranks alone; off, over the
    data-parallel ranks as well."""
    use_transformer_engine_op_fuser: bool = False
    """Where layers multiply in FP8, the MLP's activation and its gradient are written in FP8, without a copy in bf16. Dense
    layers alone."""
    activation_func_fp8_input_store: bool = False
    """With ``use_transformer_engine_op_fuser``, what the MLP's activation needs in backward is kept in FP8, half of the most
    that a layer keeps."""
    first_last_layers_bf16: bool = False
    """The first and the last layers multiply in ``params_dtype``."""
    num_layers_at_start_in_bf16: int = 1
    """First layers that ``first_last_layers_bf16`` means."""
    num_layers_at_end_in_bf16: int = 1
    """Last layers that ``first_last_layers_bf16`` means."""

    cp_comm_type: str | list[str] | None = None
    """How attention gets the keys and values of other ranks: passed round a ring ("p2p", also None), gathered before
    attention ("all_gather"), or exchanged for whole sequences of some heads ("a2a"). One for all layers, or one for
    each."""

    num_moe_experts: int | None = None
    """Experts of each mixture-of-experts layer; None: all layers are dense, and the fields below have no effect."""
    moe_layer_freq: int | list[int] = 1
    """Layers with experts: every n-th from the first on, or [num_layers] of 1 (experts) and 0 (dense)."""
    moe_ffn_hidden_size: int | None = None
    """Width between the two linear layers of an expert; None: ffn_hidden_size."""
    moe_router_topk: int = 2
    """Experts of each token."""
    moe_enable_routing_replay: bool = False
    """Routers can record the experts that they choose, and replay given ones (``RouterReplay``)."""
    moe_router_pre_softmax: bool = False
    """The softmax is over all experts, before the top-k choice; off, over the chosen ones."""
    moe_router_score_function: str = "softmax"
    """Turns logits into scores: "softmax", or a function of each logit, whose values are normalised over the chosen experts:
    "sigmoid", or "sqrtsoftplus" (the square root of softplus)."""
    moe_router_topk_scaling_factor: float | None = None
    """Factor on the probabilities of the chosen experts."""
    moe_router_num_groups: int | None = None
    """Groups of neighbouring experts, of which each token uses the best ``moe_router_group_topk`` only; None: all experts are
    one group."""
    moe_router_group_topk: int | None = None
    """Groups of each token: those with the largest sums of their moe_router_topk / moe_router_group_topk best scores."""
    moe_router_enable_expert_bias: bool = False
    """Experts are chosen by score + bias and weighed by the score; after each step the bias of an expert with fewer
    assignments than the mean grows, and that of one with more shrinks (DeepSeek-V3's balance without an auxiliary loss)."""
    moe_router_bias_update_rate: float = 1e-3
    """What the expert bias changes by in a step; the default is Megatron-Core's."""
    moe_router_dtype: str | None = None
    """Dtype of the router's logits: "fp32" or "fp64"; None: that of the input."""
    moe_router_load_balancing_type: str | list[str] = "aux_loss"
    """Tokens over which a loss balances the load: a microbatch ("aux_loss"), each sequence ("seq_aux_loss"), the step so far on
    all ranks ("global_aux_loss"), none ("none"); or "sinkhorn": in training, experts are chosen by a balanced matrix. A list: several
    of these losses, with as many coefficients."""
    moe_router_force_load_balancing: bool = False
    """Logits are random, so that all experts get as many tokens; to measure speed."""
    moe_aux_loss_coeff: float | list[float] = 0.0
    """Coefficient of the load-balancing loss; 0: there is none. A list: one for each loss."""
    moe_z_loss_coeff: float | None = None
    """Coefficient of the z-loss, the mean squared log-sum-exp of the router's logits; None: there is none."""
    moe_latent_size: int | None = None
    """Width of the routed experts' input and output, between two projections of the layer; None: hidden_size. Router and shared
    experts see the hidden states themselves."""
    moe_apply_probs_on_input: bool = False
    """The probability multiplies an expert's input, not its result; with ``moe_router_topk=1`` alone."""
    moe_shared_expert_intermediate_size: int | None = None
    """Total width of the shared experts, which compute all tokens; None: there are none."""
    moe_shared_expert_gate: bool = False
    """The shared experts' output is multiplied by a learned gate in (0, 1), one for each token."""
    moe_grouped_gemm: bool = False
    """One grouped kernel computes a linear layer of all experts where the device has it (bf16 on Hopper); elsewhere
    experts are computed one after the other."""
    moe_token_dispatcher_type: str = "alltoall"
    """How tokens reach experts on other ranks: "alltoall". "allgather", Megatron-Core's default, is served only where
    experts are not divided, where it computes the same; "flex", for libraries that send tokens otherwise, is the all-to-all too."""
    moe_expert_capacity_factor: float | None = None
    """Capacity of an expert: this factor times tokens * topk / experts of a rank's microbatch; None: no assignment is
    dropped."""
    moe_pad_expert_input_to_capacity: bool = False
    """Each expert computes exactly its capacity, padded with unused rows, so that shapes are constant."""
    moe_expert_rank_capacity_factor: float | None = None
    """Where experts are divided over ranks, each of these takes from each rank up to this factor times tokens * topk / ranks of
    its assignments, and drops what is over; shapes are constant, and the host never waits. From the number of ranks on nothing is
    dropped. None: no bound; the host waits for the counts of rows in each layer."""
    moe_token_drop_policy: str = "probs"
    """Assignments that an expert keeps when it is over capacity: the most probable ("probs") or the first ("position")."""

    fine_grained_activation_offloading: bool = False
    """What ``offload_modules`` of each layer save for backward rests in the host's memory."""
    offload_modules: Sequence[str] = ()
    """Of attn_norm, qkv_linear, core_attn, attn_proj, mlp_norm, expert_fc1 and moe_act; the last two mean all that experts save."""
    min_offloaded_tensor_size: int = 1024 * 1024
    """Elements; smaller tensors stay on the device."""
    activation_offload_fraction: float = 1.0
    """Fraction of these modules that offload, from the first layer on."""
    fine_grained_offloading_max_inflight_offloads: int | None = None
    """Layers whose tensors may be on the device while they are copied to the host; None: one."""

    def contradictions(self, *, has_faults: bool) -> list[str]:
        own = contradictions(self, has_faults=has_faults)
        return [*super().contradictions(has_faults=has_faults), *own]

    def check_has_width(self) -> None:
        """Raise ValueError where ``hidden_size`` is 0, so that there can be no layer."""
        if self.hidden_size < 1:
            raise ValueError(f"hidden_size must be at least 1 to build a layer, got {self.hidden_size}")

    def __post_init__(self) -> None:
        self.settle()
        self._derive_layout_of_pattern()
        self.check()
        self._derive("num_query_groups", self.num_query_groups or self.num_attention_heads)
        self._derive("ffn_hidden_size", self.ffn_hidden_size or 4 * self.hidden_size or None)
        self._derive("kv_channels", self.kv_channels or max(1, self.hidden_size // self.num_attention_heads))
        self._derive_stages()
        if self.experimental_attention_variant == "gated_delta_net":
            self._derive("experimental_attention_variant", "gdn")
        if isinstance(self.attention_backend, str):
            self._derive("attention_backend", AttnBackend[self.attention_backend])
        if isinstance(self.activation_func, str):
            self._derive("activation_func", ACTIVATIONS[self.activation_func])
        if self.use_mup:
            self._derive_mup()
        hidden_std = self.init_method_std / math.sqrt(self.mup_width_mult)
        self._derive_init_method("init_method", hidden_std)
        sublayers = 1.0 if self.is_hybrid_model or self.hybrid_layer_pattern is not None else 2.0
        self._derive_init_method("output_layer_init_method", hidden_std / math.sqrt(sublayers * self.num_layers))
        own_std = self.embedding_init_method_std
        if own_std is not None or self.use_mup:
            if isinstance(self.embedding_init_method, InheritedInit):
                self._derive("embedding_init_method", None)
            self._derive_init_method("embedding_init_method", self.init_method_std if own_std is None else own_std)
        elif self.embedding_init_method is None or isinstance(self.embedding_init_method, InheritedInit):
            assert self.init_method is not None, "derived above"
            self._derive("embedding_init_method", InheritedInit(self.init_method))
        self.finish()

    def _derive_layout_of_pattern(self) -> None:
        """Derive the layers of stages from a pattern that has their borders."""
        pattern = self.hybrid_layer_pattern or ""
        if "|" in pattern and self.pipeline_model_parallel_layout is None and self.pipeline_model_parallel_size > 1:
            stages = "|".join("t" * len(stage) for stage in pattern.split("|"))
            self._derive("pipeline_model_parallel_layout", f"E{stages}L")

    def _derive_stages(self) -> None:
        """Derive the number of virtual stages from a layout."""
        layout = self.pipeline_model_parallel_layout
        if layout is None:
            return
        if not isinstance(layout, PipelineParallelLayerLayout):
            layout = PipelineParallelLayerLayout(layout, self.pipeline_model_parallel_size)
        self._derive("pipeline_model_parallel_layout", layout)
        if layout.virtual_pipeline_model_parallel_size > 1:
            self._derive("virtual_pipeline_model_parallel_size", layout.virtual_pipeline_model_parallel_size)

    def _derive_mup(self) -> None:
        """Derive widths and scales of the maximal update parametrisation, as Megatron-Core does."""
        assert self.kv_channels, "derived above"
        self._derive("mup_width_mult", self.hidden_size / (self.mup_base_hidden_size or self.hidden_size or 1))
        if self.softmax_scale is None:
            base = 1.0 if self.mup_base_head_dim is None else math.sqrt(self.mup_base_head_dim)
            self._derive("softmax_scale", base / self.kv_channels**self.mup_attn_scale_power)
        if self.mup_output_mult == 1.0:
            self._derive("mup_output_mult", 1.0 / self.mup_width_mult)

    def _derive(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _derive_init_method(self, name: str, std: float) -> None:
        given = getattr(self, name)
        if given is None or isinstance(given, ConfigInit):
            self._derive(name, ConfigInit(std))


@megatron_dataclass(
    UPSTREAM_FIELDS["MLATransformerConfig"],
    special={
        "multi_latent_attention": ((True,), "without it, use TransformerConfig"),
        "cache_mla_latents": ((False,), "the model keeps nothing between the tokens that it generates"),
        "mla_down_proj_fusion": (ANY, "a hint about kernels: what runs here gives the same"),
    },
)
class MLATransformerConfig(TransformerConfig):
    """The settings of a transformer with multi-latent attention: those of ``TransformerConfig`` and of its projections.

    Queries, keys and values are made from narrow latent vectors. A head's query and key have a part that positions do not
    turn (``qk_head_dim``) and one that they turn (``qk_pos_emb_head_dim``), which all heads' keys share.

    Source: DeepSeek-V2 (arXiv:2405.04434) section 2.1; names and defaults are Megatron-Core's.
    """

    multi_latent_attention: bool = True
    """Always so."""
    q_lora_rank: int | None = 512
    """Width of the latent vector of queries; None: queries are projected from the hidden states."""
    kv_lora_rank: int = 512
    """Width of the latent vector of keys and values."""
    qk_head_dim: int = 128
    """Width of the part of a head's query and key that positions do not turn."""
    qk_pos_emb_head_dim: int = 64
    """Width of the part that they turn."""
    v_head_dim: int = 128
    """Width of a head's value."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "RMSNorm"
    rope_type: str = "yarn"
    """Rotary frequencies: those of ``rotary_base`` ("rope"), or for longer contexts ("yarn")."""
    rotary_base: float = 10000
    """Base of the rotary frequencies."""
    rotary_percent: float = 1.0
    """With "rope", fraction of ``qk_pos_emb_head_dim`` that is turned."""
    rotary_scaling_factor: float = 40
    """How many times longer contexts are than in the first training. With ``mscale_all_dim`` it scales the scores, too."""
    original_max_position_embeddings: int = 4096
    """With "yarn", the longest context of the first training."""
    beta_fast: float = 32
    """With "yarn", turns within that context from which on a channel's frequency stays."""
    beta_slow: float = 1
    """With "yarn", turns within that context up to which a channel's frequency is divided by ``rotary_scaling_factor``."""
    mscale: float = 1.0
    """With "yarn", cosines and sines are multiplied by yarn_mscale(mscale) / yarn_mscale(mscale_all_dim), where
    yarn_mscale(m) is 0.1 * m * log(rotary_scaling_factor) + 1."""
    mscale_all_dim: float = 0.0
    """See ``mscale``; scores are multiplied by yarn_mscale(mscale_all_dim) squared."""

    def contradictions(self, *, has_faults: bool) -> list[str]:
        found = super().contradictions(has_faults=has_faults)
        own = (message for holds, message in MLA_CONTRADICTIONS if holds(self))
        return [*found, *("TransformerConfig." + message.format_map(vars(self)) for message in own)]

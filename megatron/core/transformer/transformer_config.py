"""The configuration of a transformer: Megatron-Core's field names and defaults; what is not served is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from megatron.core.activations import ACTIVATIONS
from megatron.core.transformer.config_checks import check_config
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.init_methods import ConfigInit, InheritedInit, InitMethod


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """How a transformer is built and computed.

    Frozen: what is checked here stays as checked; ``dataclasses.replace`` makes another one.

    Raises:
        ValueError: a field is out of its range or contradicts another.
        NotImplementedError: a field asks for something lawful that is not served; the message names it and says why.

    Source: the names, meanings and defaults of Megatron-Core's TransformerConfig, except where a field says otherwise.
    """

    num_layers: int
    """Transformer layers."""
    hidden_size: int
    """Width of the residual stream."""
    num_attention_heads: int
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
    """Which kernels attention uses where no mask is given: torch's choice (auto), on CUDA the flash or the cuDNN kernel
    alone (flash, fused), or all scores in memory (unfused, local)."""
    fp32_residual_connection: bool = False
    """The residual stream stays in fp32 whatever ``params_dtype`` is."""
    apply_residual_connection_post_layernorm: bool = False
    """Refused when set: BERT's order of residual and norm."""
    layernorm_epsilon: float = 1e-5
    """Added to the variance (or mean square) in every norm."""
    layernorm_zero_centered_gamma: bool = False
    """Norm weights are stored as their distance from 1."""
    add_bias_linear: bool = True
    """All linear layers but the output layer have a bias."""
    add_qkv_bias: bool = False
    """The query-key-value projection has a bias even where ``add_bias_linear`` is off."""
    gated_linear_unit: bool = False
    """The MLP is activation(gate) * up, with gate and up fused in ``linear_fc1`` in this order."""
    activation_func: Callable[[torch.Tensor], torch.Tensor] | str = F.gelu
    """The MLP's activation: a function, or one of the names in ``ACTIVATIONS``. F.gelu is the exact (erf) form."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """The norm of every normalisation layer."""
    qk_layernorm: bool = False
    """Queries and keys are normalised per head; the layer spec must be asked for it too."""
    rotary_interleaved: bool = False
    """Rotary embedding turns pairs (0, 1), (2, 3), ... instead of pairs of the first and the second half."""
    softmax_scale: float | None = None
    """Factor on query-key products; None: 1 / sqrt(kv_channels)."""

    init_method: InitMethod | None = None
    """Fills embedding, output, query-key-value and first MLP weights; None: normal(0, init_method_std)."""
    output_layer_init_method: InitMethod | None = None
    """Fills the last linear layer of attention and MLP; None: normal(0, init_method_std / sqrt(2 * num_layers))."""
    embedding_init_method: InitMethod | None = None
    """Fills the embeddings; None: as ``init_method``."""
    init_method_std: float = 0.02
    """Standard deviation of the default initial weights."""
    embedding_init_method_std: float | None = None
    """Refused when set: in Megatron-Core it also exempts embeddings from weight decay. Use embedding_init_method."""
    init_seed: int = 1234
    """Initial weights are a function of this, of the parameter's full name and of its full shape. Ours; 1234 is
    Megatron-LM's default ``--seed``."""
    perform_initialization: bool = True
    """Off: random initial weights are left unwritten, for models that are about to be loaded."""
    use_cpu_initialization: bool = False
    """Initial weights are drawn on the CPU and copied: the same on every kind of device, and slower."""

    apply_query_key_layer_scaling: bool = False
    """Query-key products are divided by the layer's number, and multiplied back in the fp32 softmax."""
    attention_softmax_in_fp32: bool = True
    """The unfused attention computes its softmax in fp32. Fused attention always does."""
    bf16: bool = False
    """Says that the model trains in bf16; ``params_dtype`` must then be torch.bfloat16."""
    fp16: bool = False
    """Refused when set."""
    params_dtype: torch.dtype = torch.float32
    """Dtype in which parameters are created and layers compute."""
    deterministic_mode: bool = False
    """On CUDA, a forward pass demands that ``torch.use_deterministic_algorithms(True)`` was called."""
    calculate_per_token_loss: bool = False
    """The training loop scales gradients by the number of tokens; the model computes the same either way."""
    init_model_with_meta_device: bool = False
    """The training loop builds the model on the meta device; the model's values are the same either way."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute in backward: whole layers ("full"), the core of attention ("selective"), or nothing (None)."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With "full": chunks of ``recompute_num_layers`` layers ("uniform") or the first so many layers ("block")."""
    recompute_num_layers: int | None = None
    """Layers of a chunk ("uniform") or layers that are recomputed ("block")."""
    recompute_modules: tuple[str, ...] | list[str] | None = None
    """What "selective" recomputes; None or ["core_attn"]."""
    distribute_saved_activations: bool = False
    """Refused when set."""

    gradient_accumulation_fusion: bool = True
    """Linear layers write weight gradients into ``weight.get_main_grad()`` where the engine offers it. On by default,
    unlike Megatron-Core, since it needs no extra package here."""
    bias_activation_fusion: bool = False
    """Bias and activation are one function each way that keeps its input only. As in Megatron-Core, GELU is then the
    tanh form. Like the four fusions below it is compiled on CUDA (see DESIGN.md); off, PyTorch's own kernels run."""
    bias_dropout_fusion: bool = False
    """Bias, dropout and residual are one function each way; its random numbers are other ones than PyTorch's."""
    masked_softmax_fusion: bool = False
    """Where scores are in memory (with a mask, or ``attention_backend`` unfused or local), scale, mask and fp32 softmax
    are one function each way. Attention by PyTorch's fused kernels needs none of it."""
    apply_rope_fusion: bool = False
    """The rotation of queries and keys, with the split of the projection before it, is one function each way."""
    persist_layer_norm: bool = False
    """Norms are functions of one kernel each way that holds its rows on chip, with the residual sum before the norm and
    the residual's gradient in it; off, PyTorch's norm kernels and sums apart."""
    memory_efficient_layer_norm: bool = False
    """Refused when set."""
    cross_entropy_loss_fusion: bool = False
    """The cross entropy is one function each way that reads the logits once, and ``GPTModel`` lets its gradient
    overwrite them; off, it goes through the logits in fp32 chunks and its gradient has memory of its own."""
    cross_entropy_fusion_impl: Literal["native", "te"] = "native"
    """Whose fused cross entropy: the framework's own; "te" (transformer-engine's) is refused."""
    disable_jit_fuser: bool = False
    """The fused functions run as plain PyTorch on CUDA too, not compiled. Ours: in Megatron-LM it is a switch of the
    whole process."""

    tensor_model_parallel_size: int = 1
    """Ranks that split each layer's matrices."""
    sequence_parallel: bool = False
    """Between the split matrices, tensor-parallel ranks hold a part of the sequence each."""
    context_parallel_size: int = 1
    """Ranks that split each sequence, attention included."""
    cp_comm_type: str | list[str] | None = None
    """How attention sees the keys and values of the other ranks' parts: passed around a ring ("p2p", which None means),
    gathered before attention ("all_gather"), or whole sequences of some heads each ("a2a"). One for all layers, or one
    for each."""
    pipeline_model_parallel_size: int = 1
    """Stages of consecutive layers, of as many layers each."""
    pipeline_dtype: torch.dtype | None = None
    """Dtype of what pipeline stages send each other; None: that of the residual stream."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Refused when set."""
    expert_model_parallel_size: int = 1
    """Ranks among which a layer's experts are divided."""
    expert_tensor_parallel_size: int | None = None
    """Ranks that split each expert's matrices; None: as many as ``tensor_model_parallel_size``."""

    num_moe_experts: int | None = None
    """Experts of each mixture-of-experts layer; None: all layers are dense, and the fields below say nothing."""
    moe_layer_freq: int | list[int] = 1
    """Which layers are mixtures of experts: every so many, from the first on, or [num_layers] of 1 (experts) and 0."""
    moe_ffn_hidden_size: int | None = None
    """Width between the two linear layers of an expert; None: ffn_hidden_size."""
    moe_router_topk: int = 2
    """Experts that each token goes to."""
    moe_router_pre_softmax: bool = False
    """The softmax is over all experts, before the best are taken; off, over the taken ones."""
    moe_router_score_function: str = "softmax"
    """What makes scores of logits: "softmax" or "sigmoid" (of each alone; normalised over the taken ones)."""
    moe_router_topk_scaling_factor: float | None = None
    """Factor on the probabilities of the taken experts."""
    moe_router_dtype: str | None = None
    """Dtype of the router's logits: "fp32", "fp64", or None: the input's."""
    moe_router_load_balancing_type: str = "aux_loss"
    """Over what experts are balanced: a microbatch ("aux_loss"), each sequence ("seq_aux_loss"), nothing ("none")."""
    moe_aux_loss_coeff: float = 0.0
    """Factor of the load-balancing loss; 0: there is none."""
    moe_z_loss_coeff: float | None = None
    """Factor of the mean squared log-sum-exp of the router's logits, which keeps them small; None: there is none."""
    moe_input_jitter_eps: float | None = None
    """Refused when set, as are the router's next three."""
    moe_router_enable_expert_bias: bool = False
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    """Width of the shared experts together, to which all tokens go; None: there are none."""
    moe_shared_expert_gate: bool = False
    """The shared experts' output is multiplied by a learned gate in (0, 1), one number a token."""
    moe_shared_expert_overlap: bool = False
    """Refused when set."""
    moe_grouped_gemm: bool = False
    """All experts' linear layers are one kernel where the device has it (bf16 on Hopper); else experts run in turn."""
    moe_token_dispatcher_type: str = "alltoall"
    """How tokens reach experts on other ranks: "alltoall". "allgather", Megatron-Core's default, only where experts
    are not split, where it computes the same; "flex" is refused."""
    moe_expert_capacity_factor: float | None = None
    """An expert takes at most this times tokens x topk / experts assignments of a rank's microbatch; None: all."""
    moe_pad_expert_input_to_capacity: bool = False
    """Each expert computes exactly its capacity, with rows that count for nothing: shapes never change."""
    moe_token_drop_policy: str = "probs"
    """Which assignments an expert keeps over its capacity: the most probable ("probs") or the first ("position")."""
    multi_latent_attention: bool = False
    mtp_num_layers: int | None = None
    window_size: tuple[int, int] | None = None
    softmax_type: str = "vanilla"
    qk_l2_norm: bool = False
    use_mup: bool = False
    fp8: str | None = None
    fp4: str | None = None
    enable_autocast: bool = False
    cpu_offloading: bool = False

    def __post_init__(self) -> None:
        check_config(self)
        self._derive("num_query_groups", self.num_query_groups or self.num_attention_heads)
        self._derive("ffn_hidden_size", self.ffn_hidden_size or 4 * self.hidden_size)
        self._derive("kv_channels", self.kv_channels or self.hidden_size // self.num_attention_heads)
        if isinstance(self.attention_backend, str):
            self._derive("attention_backend", AttnBackend[self.attention_backend])
        if isinstance(self.activation_func, str):
            self._derive("activation_func", ACTIVATIONS[self.activation_func])
        self._derive_init_method("init_method", self.init_method_std)
        self._derive_init_method("output_layer_init_method", self.init_method_std / math.sqrt(2.0 * self.num_layers))
        if self.embedding_init_method is None or isinstance(self.embedding_init_method, InheritedInit):
            assert self.init_method is not None, "derived above"
            self._derive("embedding_init_method", InheritedInit(self.init_method))

    def _derive(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _derive_init_method(self, name: str, std: float) -> None:
        given = getattr(self, name)
        if given is None or isinstance(given, ConfigInit):
            self._derive(name, ConfigInit(std))

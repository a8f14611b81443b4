"""How a model is split, its dtypes and the functions of its training loop, under Megatron-Core's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch

from megatron.core.checked_config import CheckedConfig, megatron_dataclass
from megatron.core.served_arguments import ANY, Served
from megatron.core.upstream_fields import UPSTREAM_FIELDS

_WEIGHTS_AT_REST = "weights at rest are sharded by the engine, over the data-parallel ranks"

NOT_SERVED: Served = {
    "enable_autocast": ((False,), "layers compute in params_dtype; set that instead"),
    "autocast_dtype": (ANY, "only enable_autocast reads it"),
    "cross_entropy_fusion_impl": (("native", "te"), "there is one fused cross entropy"),
    "pipeline_model_parallel_comm_backend": (ANY, "stages communicate by the default backend"),
    "hierarchical_context_parallel_sizes": (ANY, "sequences are split over one axis, which gives the same"),
    "use_ring_exchange_p2p": (ANY, "stages communicate by batches of sends and receives"),
    **dict.fromkeys(
        (
            "overlap_dispatch_backward_with_experts_wgrad",
            "ep_overlap_early_attn_memory_release",
        ),
        (ANY, "a schedule: tokens are exchanged within their own microbatch, which gives the same"),
    ),
    "defer_embedding_wgrad_compute": (ANY, "weight gradients are computed in backward"),
    "wgrad_deferral_limit": (ANY, "weight gradients are computed in backward"),
    "use_te_rng_tracker": (ANY, "a CUDA graph draws the same random numbers as eager steps"),
    "batch_p2p_comm": (ANY, "messages between stages are always batched"),
    "batch_p2p_sync": (ANY, "no message makes the host wait on CUDA"),
    "overlap_p2p_comm_warmup_flush": (ANY, "with overlap_p2p_comm messages overlap in all phases of a step"),
    "deallocate_pipeline_outputs": (ANY, "outputs that were sent are always freed"),
    "barrier_with_L1_time": (ANY, "timing adds no barrier"),
    "tp_comm_overlap": (ANY, "a hint: the numbers are the same"),
    **{
        name: (ANY, "only tp_comm_overlap reads it")
        for name in UPSTREAM_FIELDS["ModelParallelConfig"]
        if name.startswith("tp_comm_") and name != "tp_comm_overlap"
    },
    "_cpu_offloading_context": (ANY, "modules are told themselves what they offload"),
    "cpu_offloading_weights": ((False,), "weights are sharded by the engine; the optimizer's can be offloaded"),
    "cpu_offloading_double_buffering": (ANY, "what comes back has memory of its own"),
    "cpu_offloading_retain_pinned_cpu_buffers": (ANY, "buffers of the host are always used again"),
}
"""Maps a field to (values that are served, why others are not)."""

_FAMILIES = (
    ("tensor_parallel_num", _WEIGHTS_AT_REST),
    ("expert_tensor_parallel_num", _WEIGHTS_AT_REST),
    ("gtp_", _WEIGHTS_AT_REST),
    ("expert_gtp_", _WEIGHTS_AT_REST),
    ("moe_grad_scale_func", "auxiliary losses are scaled as the main loss is; set grad_scale_func"),
    ("mtp_grad_scale_func", "losses of multi-token prediction are scaled as the main loss is; set grad_scale_func"),
    ("hybrid_context", "all sequences are split over all context-parallel ranks"),
    ("max_seqlen_per", "all sequences are split over all context-parallel ranks"),
    ("num_microbatches_with", "all microbatches are recomputed alike"),
)


@megatron_dataclass(UPSTREAM_FIELDS["ModelParallelConfig"], special=NOT_SERVED, families=_FAMILIES)
class ModelParallelConfig(CheckedConfig):
    """How a model is split over ranks, its dtypes, and the functions that ``get_forward_backward_func`` calls.

    Fields of Megatron-Core that are not below are accepted at their default, and refused otherwise.

    Raises:
        NotImplementedError: a field asks for something that is not served; the message names it and says why.

    Source: the names, order, meanings and defaults of Megatron-Core's class, except where a field says otherwise.
    """

    free: ClassVar[frozenset[str]] = frozenset(
        ("timers", "finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func")
    )

    perform_initialization: bool = True
    """Off: random initial weights are not written, for models that are about to be loaded."""
    use_cpu_initialization: bool = False
    """Initial weights are drawn on the CPU and copied: the same on every kind of device, but slower."""
    bf16: bool = False
    """``Float16Module`` converts the model to bf16. Without it, ``params_dtype`` alone says in which dtype it trains."""
    fp16: bool = False
    """As ``bf16``, with fp16; losses must be scaled (``grad_scale_func``, ``OptimizerConfig.fp16``)."""
    params_dtype: torch.dtype = torch.float32
    """Dtype in which parameters are created and layers compute."""
    deterministic_mode: bool = False
    """On CUDA, forward raises unless ``torch.use_deterministic_algorithms(True)`` was called."""
    gradient_accumulation_fusion: bool = True
    """Linear layers write weight gradients into ``weight.get_main_grad()`` where the parameter has it. On by default,
    unlike Megatron-Core, since it needs no extra package here."""
    gradient_accumulation_fusion_min_numel: int | None = None
    """Ours: linear layers whose weight has fewer elements leave its gradient to autograd, which costs the host less and the device
    a copy; None: 25 M on a device, 0 on a CPU. Layers of transformer-engine have no such bound."""
    cross_entropy_loss_fusion: bool = False
    """Cross entropy is one fused function that reads the logits once, and in ``GPTModel`` its gradient overwrites them;
    off, it is computed in fp32 chunks and its gradient has its own memory."""
    cross_entropy_fusion_impl: Literal["native", "te"] = "native"
    """Implementation of the fused cross entropy: ours ("native"), as which "te" is taken."""
    tensor_model_parallel_size: int = 1
    """Ranks that split each layer's matrices."""
    sequence_parallel: bool = False
    """Between the split matrices each tensor-parallel rank holds a part of the sequence."""
    context_parallel_size: int = 1
    """Ranks that split each sequence, attention included."""
    pipeline_model_parallel_size: int = 1
    """Ranks between which the layers are divided; ``TransformerConfig`` has how."""
    pipeline_dtype: torch.dtype | None = None
    """Dtype of the tensors between pipeline stages; None: that of the residual stream."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Stages of each pipeline rank, which take turns (interleaved 1F1B, arXiv:2104.04473 section 2.2.2); None: one."""
    microbatch_group_size_per_vp_stage: int | None = None
    """Microbatches that a virtual stage runs one after the other; None: as many as there are pipeline ranks."""
    overlap_p2p_comm: bool = False
    """Messages of interleaved stages travel beside the forward or backward that does not need them."""
    expert_model_parallel_size: int = 1
    """Ranks among which a layer's experts are divided."""
    overlap_moe_expert_parallel_comm: bool = False
    """The forward of a microbatch and the backward of the one before take turns, layer by layer, while tokens of one of them are exchanged."""
    delay_wgrad_compute: bool = False
    """With ``overlap_moe_expert_parallel_comm``: weight gradients of routed experts are computed once the exchange that follows has begun."""
    expert_tensor_parallel_size: int | None = None
    """Ranks that split each expert's matrices; None: as many as ``tensor_model_parallel_size``."""
    init_seed: int = 1234
    """Initial weights are a function of this seed, the parameter's full name and its full shape. Ours; 1234 is
    Megatron-LM's default ``--seed``."""
    timers: Callable[..., Any] | None = None
    """Called with names of phases, returns objects with ``start`` and ``stop``; see ``megatron.core.timers``."""
    finalize_model_grads_func: Callable[..., Any] | None = None
    """Called by the forward-backward function after the last backward, with [model], tokens or None, and the groups."""
    grad_scale_func: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Scales each loss before its backward, auxiliary losses too; ``MegatronOptimizer.scale_loss``."""
    no_sync_func: Callable[..., Any] | list[Callable[..., Any]] | None = None
    """Makes the context of all microbatches but the last; or a list of such functions, one for each chunk of the model."""
    grad_sync_func: Callable[..., Any] | None = None
    """Accepted: gradients are reduced as their unit's backward ends."""
    param_sync_func: Callable[..., Any] | None = None
    """Accepted: weights are gathered as the plan says."""
    cpu_offloading: bool = False
    """What the first ``cpu_offloading_num_layers`` layers save for backward rests in the host's memory."""
    cpu_offloading_num_layers: int = 0
    cpu_offloading_activations: bool = True
    """Off: ``cpu_offloading`` does nothing."""
    variable_seq_lengths: bool = False
    """Microbatches may differ in length; refused with several pipeline stages, whose messages have one shape."""

    def contradictions(self, *, has_faults: bool) -> list[str]:
        if self.fp16 and self.bf16:
            return ["fp16 and bf16 exclude each other, got both; set one"]
        if self.variable_seq_lengths and self.pipeline_model_parallel_size > 1:
            return [
                "variable_seq_lengths must be False with several pipeline stages, got True: messages have one shape"
            ]
        return []

    def __post_init__(self) -> None:
        self.finish()


def resolve_tensor_parallel_weight_shards(
    *,
    tensor_model_parallel_size: int,
    tensor_parallel_num_weight_shards: int | None,
    gtp_weight_remat_size: int,
    **names: str,
) -> int:
    """Return 1, the ranks over which tensor-parallel parts of weights are split at rest.

    Raises:
        NotImplementedError: there are others.
    """
    if gtp_weight_remat_size != 1 or tensor_parallel_num_weight_shards not in (None, tensor_model_parallel_size):
        raise NotImplementedError(
            "tensor_parallel_num_weight_shards must be None and gtp_weight_remat_size 1, got "
            f"{tensor_parallel_num_weight_shards} and {gtp_weight_remat_size}: {_WEIGHTS_AT_REST}"
        )
    return 1

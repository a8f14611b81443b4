"""Settings of data parallelism under Megatron-Core's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, get_args

import torch

from megatron.core.checked_config import CheckedConfig, megatron_dataclass
from megatron.core.distributed.fsdp import TRANSPORT_KINDS, MegatronFsdpPolicy, MixedPrecisionPolicy, TransportKind
from megatron.core.served_arguments import ANY, Served
from megatron.core.substitutions import Substitution, without_effect
from megatron.core.upstream_fields import UPSTREAM_FIELDS

ShardingStrategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]


def gathers_always_overlap(strategy: str) -> bool:
    """Return whether a strategy prefetches weights by default: those that shard weights do, as in Megatron-FSDP."""
    return strategy == "optim_grads_params"


_BUFFERS = "buffers are planned before training, with fixed addresses"
_FLOAT4 = "FP4 needs Blackwell"

NOT_SERVED: Served = {
    "fsdp_double_buffer": (ANY, "gathered weights lie in one arena with fixed addresses"),
    "fsdp_manual_registration": (ANY, "a buffer is registered once, when it is allocated"),
    "bucket_size": (ANY, "gradients are reduced unit by unit; choose units with fsdp_unit_modules"),
    "num_buckets": (ANY, "gradients are reduced unit by unit; choose units with fsdp_unit_modules"),
    "pad_buckets_for_high_nccl_busbw": (ANY, "buffers are padded to rows and to 64 elements"),
    "align_param_gather": (ANY, "each pipeline stage gathers by its own plan"),
    "average_in_collective": (ANY, "gradients are summed on the wire and scaled once, which gives the same mean"),
    "check_for_large_grads": ((False,), "gradients are checked for what is not finite; use check_for_nan_in_grad"),
    "fp4_param_gather": ((False,), _FLOAT4),
    "reuse_grad_buf_for_mxfp8_param_ag": (ANY, "gathers and reductions have memory of their own"),
    "use_custom_fsdp": (ANY, "it is the old name of use_megatron_fsdp"),
    "gradient_reduce_div_fusion": (ANY, "the scale is always applied with the reduction"),
    "preserve_fp32_weights": ((True,), "main weights always rest in megatron_fsdp_main_params_dtype"),
    "fsdp_db_use_persist_buf_on_alloc_fail": (ANY, _BUFFERS),
    "megatron_fsdp_max_pool_double_buffer": (ANY, _BUFFERS),
    "delay_wgrad_compute": (ANY, "weight gradients are computed in backward"),
    "megatron_fsdp_use_decoupled_grad": ((False,), "gradients are in param.grad, in megatron_fsdp_main_grads_dtype"),
    "megatron_fsdp_cuda_graph_mode": ((False,), "FullCudaGraph captures steps without a mode of the engine"),
    "megatron_fsdp_enable_fine_grained_param_gather": (
        ANY,
        "weights are gathered unit by unit; choose units with fsdp_unit_modules",
    ),
}
"""Maps a field to (values that are served, why others are not)."""


_SUBSTITUTIONS = tuple(
    without_effect({"keep_fp8_transpose_cache": False}, needs=lambda c: c.fp8_param_gather, words="fp8_param_gather")
)


@megatron_dataclass(UPSTREAM_FIELDS["DistributedDataParallelConfig"], special=NOT_SERVED)
class DistributedDataParallelConfig(CheckedConfig):
    """Settings of data parallelism, under Megatron-Core's names and in its order; fields that are ours are keywords.

    Raises:
        NotImplementedError: a setting of ``NOT_SERVED`` has a value that is not served.
        ValueError: a value is out of range, or settings contradict each other.
    """

    substitutions: ClassVar[tuple[Substitution, ...]] = _SUBSTITUTIONS

    use_megatron_fsdp: bool = False
    """Shard according to ``data_parallel_sharding_strategy``; ``DistributedDataParallel`` needs False and ``no_shard``. Megatron-FSDP's
    own wrappers shard at either value, since its package has no such field."""

    data_parallel_sharding_strategy: ShardingStrategy = "no_shard"
    """What is sharded: nothing, optimizer state (ZeRO-1), gradients too (ZeRO-2), weights too (ZeRO-3)."""

    use_distributed_optimizer: bool = False
    """Shard the optimizer state; with ``use_megatron_fsdp`` what is sharded is up to ``data_parallel_sharding_strategy``."""

    overlap_grad_reduce: bool = False
    """Reduce a unit's gradients while the next unit's backward runs. ``optim_grads`` and ``optim_grads_params`` always do,
    as in Megatron-FSDP, where False, the default, has no effect for them."""

    overlap_param_gather: bool = False
    """Prefetch the next units' weights while a unit computes. ``optim_grads_params`` always does."""

    no_overlap_grad_reduce: bool = False
    """Make compute wait for each reduction, for every strategy."""

    no_overlap_param_gather: bool = False
    """Gather each unit's weights only when they are needed, for every strategy."""

    megatron_fsdp_main_params_dtype: torch.dtype | None = torch.float32
    """Dtype of main weights; None: the parameter's dtype, or fp32 with ``megatron_fsdp_version=2``."""

    megatron_fsdp_main_grads_dtype: torch.dtype | None = None
    """Dtype in which gradients are accumulated and passed to the optimizer; None: the parameter's dtype, or the main
    weights' dtype in ``DistributedDataParallel``."""

    megatron_fsdp_grad_comm_dtype: torch.dtype | None = None
    """Dtype in which gradients are communicated; None: the main gradients' dtype, or the parameter's dtype with
    ``megatron_fsdp_version=2`` or in ``DistributedDataParallel``."""

    grad_reduce_in_fp32: bool = False
    """Use fp32 for each of the two dtypes above that is None."""

    reduce_scatter_with_fp32_accumulation: bool = False
    """Accumulate in fp32 when gradients are communicated in a narrower dtype. GPUs need ``fsdp_transport="peer_copy"``; CPUs always do."""

    param_name_patterns_for_fp32_local_accumulation: Sequence[str] = ()
    """Name patterns of parameters whose gradients must be accumulated in fp32. ``megatron_fsdp_main_grads_dtype`` must then be fp32."""

    fsdp_forward_prefetch_depth: int = 1
    """Units to prefetch ahead in forward; 0 gathers each unit's weights when they are needed."""

    fsdp_backward_prefetch_depth: int = 1
    """Units to prefetch ahead in backward."""

    fsdp_layers_per_unit: int = 1
    """Consecutive layers that are one unit, gathered and reduced together: less work for the host, more memory."""

    suggested_communication_unit_size: int | None = None
    """Elements to prefetch at least: units beyond the prefetch depth are prefetched until together they have as many;
    None: only the prefetch depth counts."""

    fsdp_memory_budget: int | float | None = None
    """Memory for weights that stay unsharded between forward and backward and between microbatches, which saves their
    second gather: bytes, or (below 1) a fraction of the device's memory; None: none."""

    fsdp_debug: bool = False
    """Fill released memory with NaN, compare each collective between ranks, and make reads of weights after their release,
    and gradients and weights that are not finite, errors that name them; slow."""

    fsdp_all_gather_in_start_param_sync: bool = True
    """Let ``start_param_sync`` gather the first unit's weights before the first forward."""

    check_for_nan_in_grad: bool = False
    """Let ``finish_grad_sync`` raise on every rank if a gradient is not finite; costs a host synchronisation."""

    fsdp_transport: TransportKind = "auto"
    """What moves bytes between ranks: a key of ``TRANSPORT_KINDS``, whose values say how."""

    use_symm_mem: bool = False
    """The same as ``fsdp_transport="symm"``."""

    nccl_ub: bool = False
    """Megatron's name for ``use_symm_mem``."""

    disable_symmetric_registration: bool = False
    """Do not register symmetric memory: ``fsdp_transport="auto"`` selects "nccl"."""

    num_distributed_optimizer_instances: int = 1
    """Hybrid sharding: the number of replicas, each sharded over an equal part of the data-parallel ranks."""

    outer_dp_sharding_strategy: Literal["no_shard", "optim"] = "no_shard"
    """What is sharded over the replicas: nothing (HSDP), or the optimizer state (HFSDP)."""

    fp8_param_gather: bool = False
    """Weights rest and travel in FP8; the model must have been built so (``TransformerConfig.fp8_param``), and weights that
    ask for it always do."""

    keep_fp8_transpose_cache: bool = False
    """Keep the transposed bytes of such weights until the weights change: more memory, fewer transposes."""

    megatron_fsdp_version: int = 1
    """1 or 2: both mean the same engine."""

    preserve_fp32_weights: bool = True
    """Must be True. Megatron-Core had it once."""

    def __post_init__(self) -> None:
        if self.use_custom_fsdp:  # type: ignore[attr-defined]
            self.use_megatron_fsdp = True
        self.finish()

    def check(self) -> None:
        super().check()
        strategies = get_args(ShardingStrategy)
        if self.data_parallel_sharding_strategy not in strategies:
            raise ValueError(
                f"data_parallel_sharding_strategy must be one of {', '.join(strategies)}, got "
                f"{self.data_parallel_sharding_strategy!r}"
            )
        if self.megatron_fsdp_version not in (1, 2):
            raise ValueError(f"megatron_fsdp_version must be 1 or 2, got {self.megatron_fsdp_version!r}")
        if self.fsdp_manual_registration and self.transport_kind != "symm":  # type: ignore[attr-defined]
            raise ValueError(
                "fsdp_manual_registration=True must come with nccl_ub=True, got False: other transports register nothing"
            )
        if self.suggested_communication_unit_size is not None and self.suggested_communication_unit_size < 1:
            raise ValueError(
                "suggested_communication_unit_size must be at least 1 element, got "
                f"{self.suggested_communication_unit_size}"
            )
        layers: object = self.fsdp_layers_per_unit
        if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
            raise ValueError(f"fsdp_layers_per_unit must be at least 1 layer, got {layers!r}")
        self._check_prefetch()
        self.check_accumulation(is_megatron_fsdp=self.use_megatron_fsdp)
        self._check_hybrid_sharding()
        budget = self.fsdp_memory_budget
        if budget is not None and not (0 < budget < 1 or (budget >= 1 and budget == int(budget))):
            raise ValueError(f"fsdp_memory_budget must be bytes, or a fraction above 0 and below 1, got {budget}")
        if self.fsdp_transport not in TRANSPORT_KINDS:
            raise ValueError(f"fsdp_transport must be one of {', '.join(TRANSPORT_KINDS)}, got {self.fsdp_transport!r}")
        if self.disable_symmetric_registration and self.transport_kind == "symm":
            raise NotImplementedError(
                "disable_symmetric_registration must be False with symmetric memory, got True: buffers are registered symmetrically or "
                "not at all; leave out nccl_ub, use_symm_mem and fsdp_transport='symm'"
            )
        if (self.use_symm_mem or self.nccl_ub) and self.fsdp_transport not in ("auto", "symm"):
            raise ValueError(
                f"{'use_symm_mem' if self.use_symm_mem else 'nccl_ub'}=True means fsdp_transport='symm', got "
                f"{self.fsdp_transport!r} besides; leave one of them out"
            )

    def check_accumulation(self, *, is_megatron_fsdp: bool) -> None:
        """Check that gradients are accumulated in the dtype that the config requires.

        Raises:
            NotImplementedError: they would be accumulated in a narrower dtype.
        """
        policy = self.mixed_precision_policy(is_megatron_fsdp=is_megatron_fsdp)
        bf16 = policy.resolve(torch.bfloat16, trainable=True)
        patterns = self.param_name_patterns_for_fp32_local_accumulation
        if patterns and bf16.sums != torch.float32:
            raise NotImplementedError(
                f"param_name_patterns_for_fp32_local_accumulation={list(patterns)} needs megatron_fsdp_main_grads_dtype=torch.float32, "
                f"got sums in {bf16.sums} for parameters in bf16: all parameters accumulate in one dtype"
            )
        if not self.reduce_scatter_with_fp32_accumulation or bf16.grad_comm == torch.float32:
            return
        if self.transport_kind == "symm":
            raise NotImplementedError(
                "reduce_scatter_with_fp32_accumulation=True needs fsdp_transport='peer_copy', which accumulates in fp32, or "
                "megatron_fsdp_grad_comm_dtype=torch.float32, got fsdp_transport='symm', where NCCL chooses the dtype"
            )

    def _check_prefetch(self) -> None:
        names = ("fsdp_forward_prefetch_depth", "fsdp_backward_prefetch_depth")
        for name in ("overlap_grad_reduce", "overlap_param_gather"):
            if getattr(self, name) and getattr(self, f"no_{name}"):
                raise ValueError(f"{name} and no_{name} must not both be True; leave one of them out")
        for name in names:
            depth: object = getattr(self, name)
            if not isinstance(depth, int) or isinstance(depth, bool) or depth < 0:
                raise ValueError(
                    f"{name} must be 0 or more units, got {depth!r}; 0 gathers each unit when it is needed"
                )
            if depth > 1 and self.no_overlap_param_gather:
                raise ValueError(
                    f"{name}={depth} must be left out with no_overlap_param_gather=True: nothing is prefetched then"
                )
            if depth != 1 and not (self.gathers_overlap or self.no_overlap_param_gather):
                raise ValueError(
                    f"{name}={depth} needs overlap_param_gather=True, got False: nothing is prefetched without"
                )
        if self.suggested_communication_unit_size is not None and 0 in (getattr(self, name) for name in names):
            raise ValueError(
                f"suggested_communication_unit_size={self.suggested_communication_unit_size} needs prefetch depths of 1 or "
                "more, got 0, which prefetches nothing; leave one of them out"
            )

    def _check_hybrid_sharding(self) -> None:
        instances, outer = self.num_distributed_optimizer_instances, self.outer_dp_sharding_strategy
        if instances < 1:
            raise ValueError(f"num_distributed_optimizer_instances must be at least 1, got {instances}")
        if outer not in ("no_shard", "optim"):
            raise ValueError(f"outer_dp_sharding_strategy must be no_shard or optim, got {outer!r}")
        if instances > 1 and not (self.use_megatron_fsdp or self.use_distributed_optimizer):
            raise ValueError(f"num_distributed_optimizer_instances={instances} needs use_megatron_fsdp=True")

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """``data_parallel_sharding_strategy``; ``use_distributed_optimizer`` without ``use_megatron_fsdp`` means "optim"."""
        strategy = self.data_parallel_sharding_strategy
        alone = self.use_distributed_optimizer and not self.use_megatron_fsdp and strategy == "no_shard"
        return "optim" if alone else strategy

    @property
    def gathers_overlap(self) -> bool:
        """True if weights are prefetched: on request, and always if they are sharded, unless it is turned off."""
        asked = self.overlap_param_gather or gathers_always_overlap(self.sharding_strategy)
        return asked and not self.no_overlap_param_gather

    @property
    def reductions_overlap(self) -> bool:
        """True if reductions overlap with compute: on request, and always if gradients are sharded, unless it is turned off."""
        asked = self.overlap_grad_reduce or self.sharding_strategy in ("optim_grads", "optim_grads_params")
        return asked and not self.no_overlap_grad_reduce

    @property
    def prefetch_depths(self) -> tuple[int, int]:
        """Units to prefetch in (forward, backward); (0, 0) if gathers do not overlap."""
        depths = (self.fsdp_forward_prefetch_depth, self.fsdp_backward_prefetch_depth)
        return depths if self.gathers_overlap else (0, 0)

    def describe_overlap(self, name_of: Callable[[str], str] = str) -> str:
        """Describe the overlap and prefetch depths in effect, and the fields that turned overlap off.

        Args:
            name_of: returns the printed name of a field, such as its flag.
        """
        forward, backward = self.prefetch_depths
        off = [name_of(name) for name in ("no_overlap_grad_reduce", "no_overlap_param_gather") if getattr(self, name)]
        by = f" ({', '.join(off)})" if off else ""
        size = self.suggested_communication_unit_size
        more = f", or more until {size:,} elements are in flight" if size and self.gathers_overlap else ""
        return (
            f"gradient reduction {self.reductions_overlap}, parameter gathering {forward + backward > 0}, "
            f"prefetch depth {forward} in forward and {backward} in backward{more}{by}"
        )

    @property
    def transport_kind(self) -> TransportKind:
        """``fsdp_transport``; "symm" if an alias is set; "nccl" for "auto" with ``disable_symmetric_registration``."""
        if self.use_symm_mem or self.nccl_ub:
            return "symm"
        registers_none = self.disable_symmetric_registration and self.fsdp_transport == "auto"
        return "nccl" if registers_none else self.fsdp_transport

    def mixed_precision_policy(self, *, is_megatron_fsdp: bool) -> MixedPrecisionPolicy:
        """Return the dtypes as a policy with Megatron-FSDP's meaning of None, or with this engine's."""
        main_grads, grad_comm = self.megatron_fsdp_main_grads_dtype, self.megatron_fsdp_grad_comm_dtype
        if self.grad_reduce_in_fp32:
            main_grads, grad_comm = main_grads or torch.float32, grad_comm or torch.float32
        policy = MixedPrecisionPolicy(self.megatron_fsdp_main_params_dtype, main_grads, grad_comm)
        return MegatronFsdpPolicy.of(policy, self.megatron_fsdp_version) if is_megatron_fsdp else policy

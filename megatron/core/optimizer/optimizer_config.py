"""Settings of the optimizer: its kind, its rates and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from megatron.core.checked_config import CheckedConfig, megatron_dataclass
from megatron.core.distributed.fsdp import newton_schulz_coefficients
from megatron.core.served_arguments import ANY, Served
from megatron.core.substitutions import Substitution, without_effect
from megatron.core.upstream_fields import UPSTREAM_FIELDS

_LATER = "it is of an optimizer that is not served yet"

NOT_SERVED: Served = {
    "bf16": (ANY, "the model says its dtype"),
    "params_dtype": (ANY, "the model says its dtype"),
    "fp8_recipe": (ANY, "the model says its recipe"),
    "main_params_dtype": ((torch.float32,), "use DistributedDataParallelConfig.megatron_fsdp_main_params_dtype"),
    "use_distributed_optimizer": (ANY, "DistributedDataParallelConfig says what is sharded"),
    "use_layer_wise_distributed_optimizer": (ANY, "ranks that share matrices divide Muon's work in any case"),
    "muon_use_syrk": ((False,), "products of Muon are whole; leave it out, which changes results by rounding alone"),
    "muon_scalar_optimizer": (("adam",), "Lion is not served; parameters that are no matrices are AdamW's"),
    "overlap_param_gather": (ANY, "DistributedDataParallelConfig says what overlaps"),
    "overlap_param_gather_with_optimizer_step": (ANY, "weights are gathered when the next forward needs them"),
    "decoupled_weight_decay": ((True,), "adam is AdamW; sgd's decay is torch's"),
    "barrier_with_L1_time": (ANY, "timing adds no barrier"),
    "config_logger_dir": (ANY, "a caller's log_config_to_disk writes there"),
    "optimizer_cuda_graph": (ANY, "FullCudaGraph captures the whole step, the optimizer with it"),
    "reuse_grad_buf_for_mxfp8_param_ag": (ANY, "gathers and reductions have memory of their own"),
    "use_torch_optimizer_for_cpu_offload": (ANY, "torch's fused AdamW updates on the host, FlatAdamW on the device"),
    "grad_norm_skip_threshold": ((float("inf"),), "no step is skipped; check_for_nan_in_grad ends a run"),
}
"""Maps a field to (values that are served, why others are not)."""

_FAMILIES = tuple((start, _LATER) for start in ("lion_", "soap_", "adaptive_muon"))


_SUBSTITUTIONS = (
    *without_effect(
        {"initial_loss_scale": 2.0**32, "min_loss_scale": 1.0, "loss_scale_window": 1000.0, "hysteresis": 2},
        needs=lambda c: c.fp16 and c.loss_scale is None,
        words="fp16=True, or with loss_scale, which is constant",
    ),
    Substitution(
        lambda c: not c.optimizer_cpu_offload and c.optimizer_offload_fraction not in (0.0, 1.0),
        "optimizer_offload_fraction has no effect without optimizer_cpu_offload",
        {"optimizer_offload_fraction": 0.0},
    ),
    *without_effect(
        {"overlap_cpu_optimizer_d2h_h2d": False, "pin_cpu_grads": True, "pin_cpu_params": True},
        needs=lambda c: c.optimizer_cpu_offload,
        words="optimizer_cpu_offload",
    ),
    Substitution(
        lambda c: c.clip_grad == math.inf,
        "clip_grad inf is taken as 0: gradients are not clipped, and their norm is still computed",
        {"clip_grad": 0.0},
    ),
)

_MUON_CHOICES = {
    "muon_scale_mode": ("spectral", "unit_rms_norm", "shape_scaling"),
    "muon_fp32_matmul_prec": ("medium", "high", "highest"),
    "muon_tp_mode": ("blockwise", "duplicated", "distributed"),
}


@megatron_dataclass(UPSTREAM_FIELDS["OptimizerConfig"], special=NOT_SERVED, families=_FAMILIES)
class OptimizerConfig(CheckedConfig):
    """Settings of ``get_megatron_optimizer``; names, order and defaults are Megatron-Core's, except where a field says otherwise.

    Fields of Megatron-Core that are not below are accepted at their default, and refused otherwise.

    Raises:
        NotImplementedError: a field asks for something that is not served; the message names it and says why.
        ValueError: a value is out of range.
    """

    free: ClassVar[frozenset[str]] = frozenset(("timers",))
    substitutions: ClassVar[tuple[Substitution, ...]] = _SUBSTITUTIONS

    timers: Callable[..., Any] | None = None
    """Accepted: the training loop times the step as a whole."""

    optimizer: str = "adam"
    """``adam`` is AdamW (decoupled weight decay), ``sgd`` is SGD with momentum, ``muon`` (or ``dist_muon``) is Muon for matrices
    and AdamW for all else."""

    lr: float | None = None
    """Largest learning rate; the scheduler scales it from step to step."""

    min_lr: float | None = None
    """Learning rate at the end of the decay; None: 0."""

    decoupled_lr: float | None = None
    """Largest learning rate of embedding and output layer; None: ``lr``."""

    decoupled_min_lr: float | None = None
    """Smallest learning rate of embedding and output layer; None: ``min_lr``."""

    fp16: bool = False
    """The model computes in fp16: losses are scaled by a scale that follows overflows, unless ``loss_scale`` is set."""

    loss_scale: float | None = None
    """Constant loss scale; None: none, or with ``fp16`` the one that follows overflows. Unlike in Megatron-Core it is in effect
    in any dtype."""

    initial_loss_scale: float = 2.0**32
    min_loss_scale: float = 1.0
    loss_scale_window: float = 1000
    """Steps without overflow after which the scale is doubled; a whole number."""

    hysteresis: int = 2
    """Overflows since the scale was last doubled from which on each one halves it."""

    weight_decay: float = 0.01
    """Decay of matrices; vectors (biases, norm weights) are never decayed."""

    apply_wd_to_qk_layernorm: bool = False
    """Decay the weights of queries' and keys' norms too."""

    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    sgd_momentum: float = 0.9

    muon_momentum: float = 0.95
    """Decay of Muon's average of gradients."""

    muon_split_qkv: bool = True
    """Muon takes queries, keys and values of all heads for three matrices, not for one."""

    muon_nesterov: bool = False
    """Muon orthogonalizes the gradient averaged with the momentum, not the momentum."""

    muon_scale_mode: str = "spectral"
    """Factor of Muon's update of an [R, C] matrix: ``spectral`` sqrt(max(R, C)), ``unit_rms_norm`` sqrt(R / C), ``shape_scaling``
    sqrt(max(1, R / C))."""

    muon_fp32_matmul_prec: str = "medium"
    """Products of Muon: ``medium`` in bf16, ``high`` and ``highest`` in fp32 as ``torch.set_float32_matmul_precision`` says."""

    muon_coefficient_type: str = "quintic"
    """Coefficients of the Newton-Schulz iterations: simple, quintic, polar_express, cans, aol, deepseekv4 or cubic5."""

    muon_num_ns_steps: int = 5
    """Newton-Schulz iterations."""

    muon_tp_mode: str = "duplicated"
    """Matrices that tensor parallelism splits: ``duplicated`` and ``distributed`` orthogonalize the whole, ``blockwise`` each
    rank's part."""

    muon_extra_scale_factor: float = 1.0
    """Another factor of Muon's update; 0.2 makes it about as large as AdamW's."""

    use_precision_aware_optimizer: bool = False
    """Sets ``store_param_remainders``, except with ``fp16``: main weights of a bf16 model must be bf16; of one in fp32, that changes
    nothing. The next three need it, as in Megatron-Core, where it needs ``use_distributed_optimizer`` too; here it goes with any
    sharding."""

    main_grads_dtype: torch.dtype = torch.float32
    """``torch.bfloat16``: main gradients must be in bf16, which ``DistributedDataParallelConfig.megatron_fsdp_main_grads_dtype`` makes
    them. ``torch.float32`` asks for nothing."""

    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    """Dtypes of Adam's averages of gradients and of their squares: fp32, bf16, fp16 or ``torch.uint8``, which is FP8 (E4M3); see
    ``FlatAdamW``."""

    store_param_remainders: bool = False
    """Adam on bf16 main weights: keep the lower 16 bits of the fp32 weights as optimizer state; see ``FlatAdamW``. Off by
    default, unlike Megatron-Core, where it does nothing without ``use_precision_aware_optimizer``."""

    overlap_update_with_forward: bool = True
    """Adam's updates of sharded models overlap the next forward; see ``FlatAdamW`` for what must wait for them."""

    optimizer_cpu_offload: bool = False
    """Adam on a sharded model: state and fp32 main weights of ``optimizer_offload_fraction`` of the parameters are in the host's
    memory, where torch's fused AdamW updates them; see ``FlatAdamW``."""

    optimizer_offload_fraction: float = 0.0
    """Fraction of the parameters, by whole units from the last one on."""

    overlap_cpu_optimizer_d2h_h2d: bool = False
    """With ``overlap_update_with_forward``: updates on the host run beside the next forward."""

    pin_cpu_grads: bool = True
    pin_cpu_params: bool = True
    """Gradients are copied to, and main weights from, page-locked memory."""

    clip_grad: float = 1.0
    """Largest norm of the whole model's gradient; 0 does not clip."""

    log_num_zeros_in_grad: bool = False
    """Count the zeros of the gradient in each step, at the cost of a pass over all gradients."""

    def __post_init__(self) -> None:
        self.optimizer = "muon" if self.optimizer == "dist_muon" else self.optimizer
        if self.min_lr is None:
            self.min_lr = 0.0
        if self.use_precision_aware_optimizer and not self.fp16:
            self.store_param_remainders = True
        self.finish()

    def check(self) -> None:
        super().check()
        if self.optimizer not in ("adam", "sgd", "muon"):
            raise ValueError(
                f"optimizer must be adam, sgd or muon, got {self.optimizer!r}; other optimizers are not served yet"
            )
        newton_schulz_coefficients(self.muon_coefficient_type, self.muon_num_ns_steps)
        for name, choices in _MUON_CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if self.lr is not None and not 0 <= (self.min_lr or 0.0) <= self.lr:
            raise ValueError(f"min_lr must be from 0 to the learning rate, got {self.min_lr} and {self.lr}")
        if self.decoupled_min_lr is not None and self.decoupled_lr is None:
            raise ValueError("decoupled_min_lr needs decoupled_lr, got None")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay must not be negative, got {self.weight_decay}")
        if (self.store_param_remainders or self.use_precision_aware_optimizer) and self.optimizer != "adam":
            raise ValueError(f"store_param_remainders must go with optimizer adam, got {self.optimizer}")
        self._check_dtypes()
        if not self.adam_eps >= 0:
            raise ValueError(f"adam_eps must not be negative, got {self.adam_eps}")
        for name in ("loss_scale", "min_loss_scale", "loss_scale_window"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.min_loss_scale > self.initial_loss_scale:
            raise ValueError(
                "min_loss_scale must be at most initial_loss_scale, got "
                f"{self.min_loss_scale} and {self.initial_loss_scale}"
            )
        if self.hysteresis < 1:
            raise ValueError(f"hysteresis must be at least 1, got {self.hysteresis}")
        if self.loss_scale_window != int(self.loss_scale_window):
            raise ValueError(f"loss_scale_window must be a whole number, got {self.loss_scale_window}")
        if not 0.0 <= self.optimizer_offload_fraction <= 1.0:
            raise ValueError(f"optimizer_offload_fraction must be from 0 to 1, got {self.optimizer_offload_fraction}")
        if self.optimizer_cpu_offload and self.optimizer != "adam":
            raise ValueError(f"optimizer_cpu_offload must go with optimizer adam, got {self.optimizer}")
        if not 0 <= self.clip_grad < math.inf:
            raise ValueError(f"clip_grad must be 0 (off) or positive, got {self.clip_grad}")
        for name in ("adam_beta1", "adam_beta2", "sgd_momentum", "muon_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")

    def _check_dtypes(self) -> None:
        for name in ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            if getattr(self, name) != torch.float32 and not self.use_precision_aware_optimizer:
                raise ValueError(
                    f"{name} must be {torch.float32} without use_precision_aware_optimizer, got {getattr(self, name)}"
                )
        if self.main_grads_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"main_grads_dtype must be torch.float32 or torch.bfloat16, got {self.main_grads_dtype}")
        if self.optimizer_cpu_offload and self.keeps_small_moments:
            raise ValueError(
                f"exp_avg_dtype and exp_avg_sq_dtype must be {torch.float32} with optimizer_cpu_offload, got {self.exp_avg_dtype} and "
                f"{self.exp_avg_sq_dtype}: state in the host's memory is in fp32"
            )

    @property
    def keeps_small_moments(self) -> bool:
        """Whether some of Adam's state is in fewer bits than fp32."""
        return (self.exp_avg_dtype, self.exp_avg_sq_dtype) != (torch.float32, torch.float32)

"""The schedule of learning rate and weight decay of a run, counted in samples."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Settings of the schedule, in samples, so that it does not change with the global batch size of a later run."""

    decay_samples: int
    """Sample at which the decay ends, warm-up included."""

    warmup_samples: float = 0
    """Samples of linear warm-up; it may be fractional."""

    warmup_init_lr: float = 0.0
    """Learning rate where warm-up starts."""

    decay_style: str = "linear"
    wsd_decay_samples: int | None = None
    """Length of the decay phase of WSD."""

    wsd_decay_style: str = "exponential"

    start_weight_decay: float
    end_weight_decay: float
    weight_decay_incr_samples: int
    """Samples until weight decay reaches ``end_weight_decay``."""

    weight_decay_incr_style: str = "constant"

    override_checkpoint: bool = False
    """Take only the position from a loaded checkpoint, and keep this schedule."""

    use_checkpoint: bool = False
    """Take the schedule of a loaded checkpoint too."""


def build_scheduler(
    config: ScheduleConfig, optimizer_config: OptimizerConfig, optimizer: MegatronOptimizer
) -> OptimizerParamScheduler:
    """Build the scheduler at sample 0; ``step(samples)`` advances it."""
    assert optimizer_config.lr is not None
    return OptimizerParamScheduler(
        optimizer,
        init_lr=config.warmup_init_lr,
        max_lr=optimizer_config.lr,
        min_lr=optimizer_config.min_lr or 0.0,
        lr_warmup_steps=config.warmup_samples,
        lr_decay_steps=config.decay_samples,
        lr_decay_style=config.decay_style,
        start_wd=config.start_weight_decay,
        end_wd=config.end_weight_decay,
        wd_incr_steps=config.weight_decay_incr_samples,
        wd_incr_style=config.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=config.use_checkpoint,
        override_opt_param_scheduler=config.override_checkpoint,
        wsd_decay_steps=config.wsd_decay_samples,
        lr_wsd_decay_style=config.wsd_decay_style,
    )

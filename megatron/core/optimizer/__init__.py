"""Optimizers over sharded main weights, under Megatron-Core's names."""

from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, MegatronGradScaler
from megatron.core.optimizer.optimizer import MegatronOptimizer, StepResult, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig

__all__ = [
    "ConstantGradScaler",
    "DynamicGradScaler",
    "MegatronGradScaler",
    "MegatronOptimizer",
    "OptimizerConfig",
    "StepResult",
    "get_megatron_optimizer",
]

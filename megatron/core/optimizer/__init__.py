"""Optimizers over sharded main weights, under Megatron-Core's names."""

from megatron.core.optimizer.chained_optimizer import ChainedOptimizer
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, MegatronGradScaler
from megatron.core.optimizer.optimizer import (
    DistributedOptimizer,
    MegatronOptimizer,
    StepResult,
    get_megatron_optimizer,
)
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_overrides import (
    ParamKey,
    ParamPredicate,
    ParamWithNamePredicate,
    get_mup_config_overrides,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import ParamGroupOverride

__all__ = [
    "ChainedOptimizer",
    "ConstantGradScaler",
    "DistributedOptimizer",
    "DynamicGradScaler",
    "MegatronGradScaler",
    "MegatronOptimizer",
    "OptimizerConfig",
    "ParamGroupOverride",
    "ParamKey",
    "ParamPredicate",
    "ParamWithNamePredicate",
    "StepResult",
    "get_megatron_optimizer",
    "get_mup_config_overrides",
    "get_standard_config_overrides",
]

"""Megatron-LM's import path of ``pretrain`` and what it calls."""

from megatron.training.library.flags import (
    get_megatron_ddp_config,
    get_megatron_optimizer_config,
    num_floating_point_operations,
)
from megatron.training.library.run import (
    get_model,
    get_train_valid_test_num_samples,
    pretrain,
    set_startup_timestamps,
    setup_model_and_optimizer,
)

__all__ = [
    "get_megatron_ddp_config",
    "get_megatron_optimizer_config",
    "get_model",
    "get_train_valid_test_num_samples",
    "num_floating_point_operations",
    "pretrain",
    "set_startup_timestamps",
    "setup_model_and_optimizer",
]

"""Megatron-LM's import path of ``pretrain`` and what it calls."""

from megatron.training.library.run import (
    get_model,
    get_train_valid_test_num_samples,
    pretrain,
    set_startup_timestamps,
)

__all__ = ["get_model", "get_train_valid_test_num_samples", "pretrain", "set_startup_timestamps"]

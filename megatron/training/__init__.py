"""Pretraining of GPT models: flags, data, loop, checkpoints and logs; ``library`` has Megatron-LM's names for other code."""

from __future__ import annotations

import importlib
from typing import Any

import megatron.core  # noqa: F401 - finds paths without files (import_paths.py)

_LATER = {
    **dict.fromkeys(
        (
            "get_adlr_autoresume",
            "get_args",
            "get_one_logger",
            "get_tensorboard_writer",
            "get_timers",
            "get_tokenizer",
            "get_wandb_writer",
        ),
        "megatron.training.library.state",
    ),
    **dict.fromkeys(
        (
            "get_model",
            "get_train_valid_test_num_samples",
            "initialize_megatron",
            "pretrain",
            "set_startup_timestamps",
        ),
        "megatron.training.library.run",
    ),
    **dict.fromkeys(("is_last_rank", "print_rank_0", "print_rank_last"), "megatron.training.utils"),
}


def __getattr__(name: str) -> Any:
    """Import names of Megatron-LM's package when they are asked for."""
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

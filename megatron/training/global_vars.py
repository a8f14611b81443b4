"""Megatron-LM's import path of what a run remembers."""

from megatron.training.library.state import (
    get_adlr_autoresume,
    get_args,
    get_one_logger,
    get_tensorboard_writer,
    get_timers,
    get_tokenizer,
    get_wandb_writer,
    rebuild_tokenizer,
    set_args,
    set_global_variables,
    unset_global_variables,
)

destroy_global_vars = unset_global_variables

__all__ = [
    "destroy_global_vars",
    "get_adlr_autoresume",
    "get_args",
    "get_one_logger",
    "get_tensorboard_writer",
    "get_timers",
    "get_tokenizer",
    "get_wandb_writer",
    "rebuild_tokenizer",
    "set_args",
    "set_global_variables",
    "unset_global_variables",
]

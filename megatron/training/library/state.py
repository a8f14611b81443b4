"""What code written for Megatron-LM asks for anywhere: its arguments, the tokenizer and the timers of the run."""

from __future__ import annotations

from argparse import Namespace

from megatron.core.num_microbatches_calculator import (
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)
from megatron.core.timers import Timers
from megatron.core.tokenizers import MegatronTokenizerBase
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer as build_from_args


class _State:
    """What ``set_global_variables`` was given and made."""

    args: Namespace | None = None
    tokenizer: MegatronTokenizerBase | None = None
    timers: Timers | None = None


_state = _State()


def get_args() -> Namespace:
    """Return the arguments of the run.

    Raises:
        AssertionError: they are not set.
    """
    if _state.args is None:
        raise AssertionError("arguments must be set before they are asked for; call parse_and_validate_args()")
    return _state.args


def set_args(args: Namespace | None) -> None:
    """Remember the arguments of the run."""
    _state.args = args


def get_tokenizer() -> MegatronTokenizerBase:
    """Return the tokenizer of the run, which is built at the first call."""
    if _state.tokenizer is None:
        _state.tokenizer = build_from_args(get_args())
    return _state.tokenizer


def rebuild_tokenizer(args: Namespace) -> MegatronTokenizerBase:
    """Build the tokenizer of these arguments, in place of the one of the run."""
    _state.tokenizer = build_from_args(args)
    return _state.tokenizer


def get_timers() -> Timers:
    """Return the timers of the run, of ``--timing-log-level`` and ``--timing-log-option``."""
    if _state.timers is None:
        args = get_args()
        _state.timers = Timers(int(args.timing_log_level), args.timing_log_option)
    return _state.timers


def set_global_variables(args: Namespace, build_tokenizer: bool = True) -> None:
    """Remember the arguments of the run, its batch sizes, and with ``build_tokenizer`` build its tokenizer.

    Raises:
        AssertionError: arguments are set already.
    """
    if _state.args is not None:
        raise AssertionError("arguments must be set once; call unset_global_variables() before")
    set_args(args)
    init_num_microbatches_calculator(
        args.rank,
        args.rampup_batch_size,
        args.global_batch_size,
        args.micro_batch_size,
        args.data_parallel_size,
        args.decrease_batch_size_if_needed,
        args.step_batch_size_schedule,
        args.seq_length,
    )
    if build_tokenizer:
        get_tokenizer()


def unset_global_variables() -> None:
    """Forget all."""
    _state.args = _state.tokenizer = _state.timers = None
    unset_num_microbatches_calculator()


def no_writer() -> None:
    """Return None: the training loop has its own writers."""


get_tensorboard_writer = get_wandb_writer = get_one_logger = get_adlr_autoresume = no_writer

"""All flags in effect, in the order of ``--help``, and what follows from their rows: names, defaults, and fields of the same names."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Container
from dataclasses import fields
from typing import Any

from megatron.training.cli.flags_attention import ATTENTION_FLAGS, LINEAR_ATTENTION_FLAGS
from megatron.training.cli.flags_batch import BATCH_FLAGS
from megatron.training.cli.flags_checkpoint import CHECKPOINT_FLAGS, LOGGING_FLAGS
from megatron.training.cli.flags_data import DATA_FLAGS, FIM_FLAGS
from megatron.training.cli.flags_distributed import RANK_FLAGS, SHARDING_FLAGS, TRANSPORT_FLAGS
from megatron.training.cli.flags_experts import EXPERT_FLAGS, ROUTER_FLAGS
from megatron.training.cli.flags_fp8 import FP8_FLAGS
from megatron.training.cli.flags_model import (
    HYBRID_FLAGS,
    LAYER_FLAGS,
    MLA_FLAGS,
    MODEL_FLAGS,
    MTP_FLAGS,
    MUP_FLAGS,
    NUMERICS_FLAGS,
)
from megatron.training.cli.flags_parallel import PARALLEL_FLAGS
from megatron.training.cli.flags_tokenizer import TOKENIZER_FLAGS
from megatron.training.cli.flags_training import (
    GRAPH_FLAGS,
    LOOP_FLAGS,
    LOSS_SCALE_FLAGS,
    OFFLOAD_FLAGS,
    OPTIMIZER_FLAGS,
    PROFILING_FLAGS,
    SCHEDULE_FLAGS,
    TUNER_FLAGS,
)

FLAG_GROUPS = (
    MODEL_FLAGS,
    LAYER_FLAGS,
    MTP_FLAGS,
    MUP_FLAGS,
    NUMERICS_FLAGS,
    ATTENTION_FLAGS,
    LINEAR_ATTENTION_FLAGS,
    HYBRID_FLAGS,
    MLA_FLAGS,
    EXPERT_FLAGS,
    ROUTER_FLAGS,
    PARALLEL_FLAGS,
    BATCH_FLAGS,
    OPTIMIZER_FLAGS,
    SCHEDULE_FLAGS,
    LOOP_FLAGS,
    LOSS_SCALE_FLAGS,
    OFFLOAD_FLAGS,
    DATA_FLAGS,
    FIM_FLAGS,
    TOKENIZER_FLAGS,
    CHECKPOINT_FLAGS,
    LOGGING_FLAGS,
    PROFILING_FLAGS,
    RANK_FLAGS,
    TRANSPORT_FLAGS,
    SHARDING_FLAGS,
    GRAPH_FLAGS,
    TUNER_FLAGS,
    FP8_FLAGS,
)
"""The flags in effect, in the order of ``--help``."""

_ROWS = [flag for group in FLAG_GROUPS for flag in group.flags]
DEFAULTS: dict[str, Any] = {flag.dest: flag.facts().get("default") for flag in reversed(_ROWS)}
SPELLINGS: dict[str, str] = {flag.dest: flag.spellings[0] for flag in reversed(_ROWS)}
"""Of each argument, by its name; where several flags set it, of the first one."""


def same_named(kind: type[Any], args: Namespace, *, but: Container[str] = ()) -> dict[str, Any]:
    """Return the fields of a dataclass that are arguments of the same names.

    Args:
        but: fields that are left out, since their values are not those of the arguments.
    """
    names = (field.name for field in fields(kind) if field.name in DEFAULTS and field.name not in but)
    return {name: getattr(args, name) for name in names}

"""What the tuner chooses, as flags: which flags, which of them stand, and which lines would be refused."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.distributed.fsdp import TRANSPORT_KINDS
from megatron.training.arguments import CheckedLine, Settings, check_command_line
from megatron.training.cli.flag_parser import split_by_flag
from megatron.training.cli.flags_training import GRAPH_IMPLEMENTATIONS
from megatron.training.formats.value_kinds import Kind, one_of, whole
from megatron.training.tuner.config import AUTO, autos_on

SWITCHES = {
    "overlap_param_gather": "--overlap-param-gather",
    "overlap_grad_reduce": "--overlap-grad-reduce",
    "create_all_gather_group": "--create-all-gather-group",
    "no_gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
}
WITH_VALUE = {
    "fsdp_transport": "--fsdp-transport",
    "fsdp_forward_prefetch_depth": "--fsdp-forward-prefetch-depth",
    "fsdp_backward_prefetch_depth": "--fsdp-backward-prefetch-depth",
    "suggested_communication_unit_size": "--suggested-communication-unit-size",
    "fsdp_memory_budget": "--fsdp-memory-budget",
    "fsdp_layers_per_unit": "--fsdp-layers-per-unit",
    "cuda_graph_impl": "--cuda-graph-impl",
    "micro_batch_size": "--micro-batch-size",
    "gradient_accumulation_fusion_min_numel": "--gradient-accumulation-fusion-min-numel",
}
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(SWITCHES, Kind("true", lambda value: value is True)),
    **dict.fromkeys(WITH_VALUE, whole(0, 1 << 50)),
    "fsdp_transport": one_of(*TRANSPORT_KINDS),
    "cuda_graph_impl": one_of(*GRAPH_IMPLEMENTATIONS),
}
"""They may come from a file, and get onto the command line."""

_NAMES = {flag: name for name, flag in (SWITCHES | WITH_VALUE).items()}
_FIXED_BY_OTHERS = {
    "--no-gradient-accumulation-fusion": "gradient_accumulation_fusion_min_numel",
    "--no-overlap-grad-reduce": "overlap_grad_reduce",
    "--no-overlap-param-gather": "overlap_param_gather",
    "--use-nccl-ub": "fsdp_transport",
    "--cuda-graph-scope": "cuda_graph_impl",
}


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as flags.

    Raises:
        ValueError: a setting is none that the tuner chooses, or its value is none of a flag.
    """
    flags: list[str] = []
    for name, value in settings.items():
        if name not in _KINDS:
            raise ValueError(f"tuned settings must be among {', '.join(sorted(_KINDS))}, got {name!r}")
        flag = SWITCHES.get(name) or WITH_VALUE[name]
        if not _KINDS[name].holds(value):
            raise ValueError(f"{name}, which is {flag}, must be {_KINDS[name].words}, got {reprlib.repr(value)}")
        flags += [flag] if name in SWITCHES else [flag, str(value)]
    return flags


def words_of(settings: Mapping[str, Any]) -> str:
    """Describe settings as the flags that give them."""
    return " ".join(flags_of(settings)) or "the launch line as it is"


def named_on(words: Sequence[str]) -> set[str]:
    """Return the settings that stay as the launch line has them: those that it names, or all but those that it gives as ``auto``."""
    autos = autos_on(words)
    if autos & set(AUTO):
        return set(SWITCHES | WITH_VALUE) - {_NAMES[flag] for flag in autos}
    given = {flag for flag, _ in split_by_flag(words) if flag is not None} - autos
    named = {table[flag] for table in (_NAMES, _FIXED_BY_OTHERS) for flag in given if flag in table}
    return named - {"micro_batch_size"}


def line_with(words: Sequence[str], settings: Mapping[str, Any], *, world_size: int) -> CheckedLine:
    """Check the launch line with these settings."""
    return check_command_line([*words, *flags_of(settings)], world_size=world_size)


def settings_with(words: Sequence[str], settings: Mapping[str, Any], *, world_size: int) -> Settings:
    """Return all settings of the launch line with these.

    Raises:
        ValueError: the line is refused.
    """
    line = line_with(words, settings, world_size=world_size)
    if line.settings is None:
        raise ValueError("; ".join(line.faults))
    return line.settings

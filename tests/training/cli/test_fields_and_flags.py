"""A setting has one fate, whichever door it comes through: as a flag, or as a field of a configuration."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.core.checked_config import CheckedConfig
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.served_arguments import ANY
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import build_parser
from megatron.training.cli.upstream_flags import UPSTREAM_FLAGS, UpstreamFlag

# Settings that the command line decides by others besides.
WITH_OTHERS = {"fsdp_manual_registration"}


def _by_dest() -> dict[str, tuple[str, UpstreamFlag]]:
    return {flag.dest or name.lstrip("-").replace("-", "_"): (name, flag) for name, flag in UPSTREAM_FLAGS.items()}


def _another_value(flag: UpstreamFlag, served: tuple[Any, ...]) -> list[str] | None:
    """Words for a value that is not among those that are served; None where there is none."""
    if flag.nargs == 0:
        return []
    if flag.choices:
        others = [choice for choice in flag.choices if choice not in map(str, served) and choice != str(flag.default)]
        return others[-1:] or None
    return ["7"] if flag.kind in ("int", "float") else ["another"]


@pytest.mark.parametrize("kind", [TransformerConfig, OptimizerConfig, DistributedDataParallelConfig])
def test_a_field_is_accepted_where_its_flag_is(kind: type[CheckedConfig]) -> None:
    flags, compared = _by_dest(), 0
    for name, (served, _) in kind.served.items():
        if name not in flags or name in WITH_OTHERS:
            continue
        spelling, flag = flags[name]
        words = _another_value(flag, served)
        if words is None:
            continue
        line = build_parser().read([spelling, *words])
        if line.fates[0].kind == "in effect":
            continue  # the configuration itself decides
        compared += 1
        assert (not line.faults) is (served is ANY), f"{name}: {line.faults or line.said_once}"
    assert compared > 5

"""Flags and fields whose defaults differ from Megatron-LM's, for the documentation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.upstream_fields import UPSTREAM_FIELDS
from megatron.training.arguments import build_parser
from megatron.training.cli.upstream_flags import UPSTREAM_FLAGS

WORDS = {
    "--ckpt-format": "ours: PyTorch DCP directories, which any number of ranks can load",
    "--dist-ckpt-strictness": "missing, extra and mis-shaped keys are errors",
    "--distributed-backend": "`nccl` where there is a GPU, `gloo` elsewhere",
    "--rerun-mode": "no step is run twice",
    "--verify-integrity": "always so: files are compared with their checksums when they are loaded",
    "ModelParallelConfig.gradient_accumulation_fusion": "it needs no further package here",
    "TransformerConfig.moe_token_dispatcher_type": "where experts are divided, tokens go by one all-to-all; elsewhere both compute the "
    "same",
    "OptimizerConfig.store_param_remainders": "there it does nothing without `use_precision_aware_optimizer`, which sets it here",
}
"""What users read about a default that differs."""

Rows = dict[str, tuple[object, object, str]]
"""Flag, or class and field: (default of Megatron-LM, ours, what it means)."""


def of_flags() -> Rows:
    """Return the flags. The default of a switch tells whether it is as if the switch were given."""
    parser = build_parser()
    rows: dict[str, tuple[object, object]] = {}
    for flag, upstream in UPSTREAM_FLAGS.items():
        theirs, action = upstream.default, parser._option_string_actions.get(flag)
        if action is not None:
            ours = parser.get_default(action.dest)
            if action.nargs == 0:
                # Settings of the two may have other names, and opposite meanings: compare whether the flag would change them.
                theirs, ours = False, ours == action.const
        elif (so := parser.always_so.get(flag)) is not None and so.values and theirs is not None:
            ours = theirs if str(theirs) in so.values else so.values[0]
        else:
            continue
        if ours != theirs and not (ours in (None, "") and theirs in (None, "")):
            rows[flag] = theirs, ours
    return _with_words(rows)


def of_fields() -> Rows:
    """Return the fields."""
    kinds = (
        ModelParallelConfig,
        TransformerConfig,
        MLATransformerConfig,
        OptimizerConfig,
        DistributedDataParallelConfig,
    )
    return _with_words(
        {
            f"{kind.__name__}.{name}": (theirs, known[name])
            for kind in kinds
            for known in [{field.name: _plain(field.default) for field in dataclasses.fields(kind)}]
            for name, theirs in UPSTREAM_FIELDS[kind.__name__].items()
            if known[name] != theirs and not (theirs == () and known[name] is dataclasses.MISSING)
        }
    )


def _with_words(rows: Mapping[str, tuple[object, object]]) -> Rows:
    return {name: (*row, WORDS[name]) for name, row in rows.items()}


def _plain(value: Any) -> Any:
    """Return a function or a member of an enumeration by its name, as ``UPSTREAM_FIELDS`` has it."""
    return getattr(value, "__name__", None) or (value.name if hasattr(value, "name") else value)

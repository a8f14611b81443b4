"""Write ``megatron/training/cli/upstream_defaults.py`` and ``megatron/core/upstream_defaults.py``: defaults that differ from Megatron-LM's.

    python tools/upstream_defaults.py flags.json

The file is that of ``tools/upstream_flags.py``. Defaults of fields are compared with ``megatron/core/upstream_fields.py``, which
``tools/upstream_fields.py`` writes from Megatron-Core's classes. Only ``WORDS`` is written by hand.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Works without an installed package too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core import upstream_fields
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training.arguments import build_parser
from tools.upstream_flags import value_of

REPOSITORY = Path(__file__).resolve().parent.parent
OF_FLAGS = REPOSITORY / "megatron/training/cli/upstream_defaults.py"
OF_FIELDS = REPOSITORY / "megatron/core/upstream_defaults.py"
CONFIGS: tuple[tuple[type, Mapping[str, object]], ...] = (
    (ModelParallelConfig, upstream_fields.MODEL_PARALLEL_CONFIG),
    (TransformerConfig, upstream_fields.TRANSFORMER_CONFIG),
    (MLATransformerConfig, upstream_fields.MLA_TRANSFORMER_CONFIG),
    (OptimizerConfig, upstream_fields.OPTIMIZER_CONFIG),
    (DistributedDataParallelConfig, upstream_fields.DISTRIBUTED_DATA_PARALLEL_CONFIG),
)
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

_HEAD = '''"""{what} whose defaults differ from Megatron-LM's; written by ``tools/upstream_defaults.py``: do not edit."""

from __future__ import annotations

# fmt: off
DEFAULTS: dict[str, tuple[object, object, str]] = {{
'''
_TAIL = '}}\n"""{key}: (default of Megatron-LM, ours, what it means)."""\n'


def table_of_flags(flags: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of the table of flags; the default of a switch says whether it is as if the switch were given."""
    parser = build_parser()
    args = vars(parser.parse_flags([]))
    rows: dict[str, tuple[object, object]] = {}
    for flag, entry in sorted(flags.items()):
        theirs = value_of(entry["default"])
        if (action := parser._option_string_actions.get(flag)) is not None and action.dest in args:
            ours = args[action.dest]
            if action.nargs == 0:
                # Settings of the two may have other names, and opposite meanings: compare whether the flag would change them.
                theirs, ours = theirs == value_of(entry["const"]), ours == action.const
        elif (so := parser.always_so.get(flag)) is not None and so.values and theirs is not None:
            ours = theirs if str(theirs) in so.values else so.values[0]
        else:
            continue
        if ours != theirs and not (ours in (None, "") and theirs in (None, "")):
            rows[flag] = theirs, ours
    return _table("Flags", "Flag", rows)


def table_of_fields() -> str:
    """Return the text of the table of fields."""
    rows = {
        f"{kind.__name__}.{name}": (theirs, known[name])
        for kind, upstream in CONFIGS
        for known in [{field.name: _plain(field.default) for field in dataclasses.fields(kind)}]
        for name, theirs in upstream.items()
        if known[name] != theirs and not (theirs == () and known[name] is dataclasses.MISSING)
    }
    return _table("Fields of configurations", "Class and field", rows)


def _table(what: str, key: str, rows: Mapping[str, tuple[object, object]]) -> str:
    lines = (f'    "{name}": {(*row, WORDS[name])!r},\n' for name, row in rows.items())
    return _HEAD.format(what=what) + "".join(lines) + _TAIL.format(key=key)


def _plain(value: Any) -> Any:
    """Return a function or a member of an enumeration by its name, as the table of Megatron-Core's fields has it."""
    return getattr(value, "__name__", None) or (value.name if hasattr(value, "name") else value)


def main(argv: Sequence[str]) -> None:
    """Write both tables."""
    (source,) = argv
    OF_FLAGS.write_text(table_of_flags(json.loads(Path(source).read_text(encoding="utf-8"))), encoding="utf-8")
    OF_FIELDS.write_text(table_of_fields(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

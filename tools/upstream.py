"""Write what Megatron-LM's parser and configurations have, as JSON that this package reads.

    python tools/upstream.py flags flags.json
    python tools/upstream.py fields FOLDER

The first writes ``megatron/training/cli/upstream_flags.json`` from a file that maps each spelling to its dest, default, type, choices
and nargs, all but the choices as ``repr`` gives them. The second writes ``megatron/core/upstream_fields.json`` from the source in
FOLDER, a checkout of Megatron-LM; nothing of it is imported.
"""

from __future__ import annotations

import ast
import json
import operator
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MEGATRON = Path(__file__).resolve().parent.parent / "megatron"
FLAGS, FIELDS = MEGATRON / "training/cli/upstream_flags.json", MEGATRON / "core/upstream_fields.json"
CONFIGS = {
    "ModelParallelConfig": "model_parallel_config.py",
    "TransformerConfig": "transformer/transformer_config.py",
    "MLATransformerConfig": "transformer/transformer_config.py",
    "OptimizerConfig": "optimizer/optimizer_config.py",
    "DistributedDataParallelConfig": "distributed/distributed_data_parallel_config.py",
}


def text_of_flags(flags: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of the file of flags, one on each line."""
    rows = (f"{json.dumps(flag)}: {json.dumps(_row(flag, entry))}" for flag, entry in sorted(flags.items()))
    return "{\n" + ",\n".join(rows) + "\n}\n"


def _row(flag: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    facts = {
        "kind": "" if entry["type"] in ("None", "str") else entry["type"],
        "nargs": value_of(entry["nargs"]),
        "choices": [choice.rsplit(".", 1)[-1] for choice in entry["choices"] or ()],
        "dest": "" if entry["dest"] == flag.lstrip("-").replace("-", "_") else entry["dest"],
    }
    return {
        "default": value_of(entry["default"]),
        **{name: fact for name, fact in facts.items() if fact not in ("", None, [])},
    }


def value_of(text: str) -> Any:
    """Evaluate what ``repr`` gave; of a member of an enumeration, its name."""
    if text.startswith("<"):
        return text[1:].split(":")[0].split(".")[-1]
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def text_of_fields(folder: Path) -> str:
    """Return the text of the file of fields, from a checkout of Megatron-LM."""
    tables = {
        name: fields_of((folder / "megatron/core" / path).read_text(encoding="utf-8"), name)
        for name, path in CONFIGS.items()
    }
    return json.dumps(tables, indent=1) + "\n"


def fields_of(source: str, name: str) -> dict[str, Any]:
    """Return the default of each field of a dataclass: a value of JSON, or the name of a dtype, an enumeration's member or a function."""
    (definition,) = (n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name)
    found = {}
    for node in definition.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        value: ast.expr | None = node.value
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "field":
            given = {keyword.arg: keyword.value for keyword in value.keywords}
            value = given.get("default", ast.List(elts=[]))  # else a factory of an empty list
        found[node.target.id] = _default(value)
    return found


def _default(value: ast.expr | None) -> Any:
    if value is None:
        return None
    text = ast.unparse(value)
    if isinstance(value, ast.Attribute):
        return text if text.startswith("torch.") else value.attr
    if isinstance(value, ast.BinOp):
        return {ast.Mult: operator.mul, ast.Pow: operator.pow}[type(value.op)](
            *map(_default, (value.left, value.right))
        )
    return float("inf") if text == "float('inf')" else ast.literal_eval(value)


def main(argv: Sequence[str]) -> None:
    """Write one of the files."""
    what, source = argv
    if what == "flags":
        FLAGS.write_text(text_of_flags(json.loads(Path(source).read_text(encoding="utf-8"))), encoding="utf-8")
    else:
        FIELDS.write_text(text_of_fields(Path(source)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

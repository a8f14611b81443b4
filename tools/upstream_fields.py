"""Write ``megatron/core/upstream_fields.py``: the fields of Megatron-Core's configurations, with order and defaults, from its source.

``python tools/upstream_fields.py FOLDER``, where FOLDER is a checkout of Megatron-LM; nothing of it is imported.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from pathlib import Path

TABLES = {
    "MODEL_PARALLEL_CONFIG": ("model_parallel_config.py", "ModelParallelConfig"),
    "TRANSFORMER_CONFIG": ("transformer/transformer_config.py", "TransformerConfig"),
    "MLA_TRANSFORMER_CONFIG": ("transformer/transformer_config.py", "MLATransformerConfig"),
    "OPTIMIZER_CONFIG": ("optimizer/optimizer_config.py", "OptimizerConfig"),
    "DISTRIBUTED_DATA_PARALLEL_CONFIG": (
        "distributed/distributed_data_parallel_config.py",
        "DistributedDataParallelConfig",
    ),
}
HEAD = '''"""Fields of Megatron-Core's configurations: names, order and defaults. Made by tools/upstream_fields.py; do not edit."""

from __future__ import annotations

import torch

'''


def fields_of(source: str, name: str) -> dict[str, str]:
    """Return the default, as source text, of each field of a dataclass; lists that are empty by default are ``()``."""
    (definition,) = (n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name)
    found = {}
    for node in definition.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        value: ast.expr | None = node.value
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "field":
            given = {keyword.arg: keyword.value for keyword in value.keywords}
            value = given.get("default", ast.parse("()", mode="eval").body)
        found[node.target.id] = _text(value)
    return found


def _text(value: ast.expr | None) -> str:
    """Return a default as source text; that of an enumeration or a function by its name."""
    text = "None" if value is None else ast.unparse(value)
    if isinstance(value, ast.Attribute) and not text.startswith("torch."):
        return repr(value.attr)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--output", type=Path, default=Path("megatron/core/upstream_fields.py"))
    arguments = parser.parse_args()
    text = HEAD
    for table, (path, name) in TABLES.items():
        fields = fields_of((arguments.folder / "megatron/core" / path).read_text(), name)
        rows = "".join(f'    "{field}": {default},\n' for field, default in fields.items())
        text += f"{table}: dict[str, object] = {{\n{rows}}}\n\n"
    arguments.output.write_text(text.rstrip() + "\n")
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", str(arguments.output)], check=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

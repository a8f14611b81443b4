"""One function writes ``param.grad``, and one call scales gradients: both are found by reading the engine's source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import megatron.core.distributed.fsdp as engine

_ENGINE = Path(engine.__file__).parent

# Who else writes an attribute ``grad``, and why that is not of a parameter of a group.
_OTHER_WRITERS = {
    "dtensor/uneven_dtensor.py:__deepcopy__": "a copy belongs to no group",
    "foreign_optimizers/bitsandbytes": "a plain tensor of rows, which the library steps on",
    "self_audit.py": "the unsharded reference model",
}
# Who else hands ``scale`` to a reduction, and why that is not a group's gradient.
_OTHER_SCALES = {
    "comm/": "transports do what they are asked",
    "buffers/dbuffer.py": "buffers that users make",
    "compat/": "buffers that users make",
}


def _calls_and_writes() -> Iterator[tuple[str, ast.AST]]:
    """Yield (file:function, node) of the whole engine; the innermost function."""

    def visit(node: ast.AST, where: str, name: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            inner = child.name if isinstance(child, ast.FunctionDef) else name
            yield f"{where}:{inner}", child
            yield from visit(child, where, inner)

    for path in sorted(_ENGINE.rglob("*.py")):
        yield from visit(ast.parse(path.read_text()), path.relative_to(_ENGINE).as_posix(), "")


def _writes_grad(node: ast.AST) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    targets = [each for target in targets for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        return any(isinstance(target, ast.Attribute) and target.attr == "grad" for target in targets)
    if not isinstance(node, ast.Call):
        return False
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    strings = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
    return "setattr" in names and "grad" in strings


def _without(found: set[str], others: dict[str, str]) -> set[str]:
    return {where for where in found if not where.startswith(tuple(others))}


def test_one_function_writes_the_gradients_of_parameters() -> None:
    found = {where for where, node in _calls_and_writes() if _writes_grad(node)}
    assert _without(found, _OTHER_WRITERS) == {"buffers/sharded_grad.py:set_grads"}


def test_one_call_scales_gradients() -> None:
    calls = [
        where
        for where, node in _calls_and_writes()
        if isinstance(node, ast.Call) and {"accumulate", "scale"} <= {keyword.arg for keyword in node.keywords}
    ]
    assert [where for where in calls if where in _without(set(calls), _OTHER_SCALES)] == ["buffers/grad_sums.py:finish"]

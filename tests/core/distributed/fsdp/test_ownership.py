"""State has owners: the source of the core is inspected, not run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.code_lines import CORE, ENGINE, by_folder

MAX_ATTRIBUTES = 20
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Attributes of torch's tensors and DTensors, which those who make them set. ``test_one_writer.py`` bounds who writes ``grad``.
OF_TORCH = {"grad", "data", "requires_grad", "grad_dtype", "_local_tensor", "_spec", "__class__"}
# Objects whose users hold them, so that no other object can take their place.
SWAPPED = {
    "api/fully_shard.py": "fully_shard makes the user's module an FsdpModule, as FSDP2 does",
    "buffers/param_slots.py": "whoever kept a parameter from before sharding gets an error from it",
}
# The size that the core has reached; issue by issue it goes down. ``python -m tests.support.code_lines`` prints it by folder.
MAX_CODE_LINES, MAX_FILES, MIN_COMMENTS = 7707, 57, 0.1


def core_files() -> list[Path]:
    return sorted(path for folder in CORE if (ENGINE / folder).exists() for path in (ENGINE / folder).rglob("*.py"))


def targets(node: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the attributes that a statement assigns or deletes."""
    assigned: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        assigned = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For):
        assigned = [node.target]
    elif isinstance(node, ast.With):
        assigned = [item.optional_vars for item in node.items if item.optional_vars is not None]
    while assigned:
        target = assigned.pop()
        if isinstance(target, ast.Tuple | ast.List):
            assigned += target.elts
        elif isinstance(target, ast.Starred):
            assigned.append(target.value)
        elif isinstance(target, ast.Attribute):
            yield target


def is_self(expression: ast.expr) -> bool:
    return isinstance(expression, ast.Name) and expression.id in ("self", "cls")


def attributes_of(cls: ast.ClassDef) -> set[str]:
    """Return the names of the attributes that instances of a class have: those its methods assign, and fields."""
    fields = {
        item.target.id
        for item in cls.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        if not ast.unparse(item.annotation).startswith("ClassVar")
    }
    methods = (item for item in cls.body if isinstance(item, FUNCTIONS))
    assigned = {
        target.attr
        for method in methods
        for node in ast.walk(method)
        for target in targets(node)
        if is_self(target.value)
    }
    properties = {
        item.name
        for item in cls.body
        if isinstance(item, FUNCTIONS) and "property" in map(ast.unparse, item.decorator_list)
    }
    return (fields | assigned) - properties


def classes_of(tree: ast.AST) -> dict[str, set[str]]:
    return {node.name: attributes_of(node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def assigned_from_outside(tree: ast.AST, owned: set[str]) -> list[str]:
    """Return the statements that assign an attribute of ``owned`` on another object than ``self``.

    A class may assign its attributes on its other instances, as constructors in class methods do.
    """
    found: list[str] = []

    def visit(node: ast.AST, own: set[str]) -> None:
        if isinstance(node, ast.ClassDef):
            own = attributes_of(node)
        found.extend(
            f"line {target.lineno}: {ast.unparse(target)}"
            for target in targets(node)
            if not is_self(target.value) and target.attr in owned - own - OF_TORCH
        )
        for child in ast.iter_child_nodes(node):
            visit(child, own)

    visit(tree, set())
    return found


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """The parsed files of the core by path."""
    return {str(path.relative_to(ENGINE)): ast.parse(path.read_text(encoding="utf-8")) for path in core_files()}


def test_the_inspection_finds_what_it_looks_for() -> None:
    source = """
class Group:
    size: int = 0
    def __init__(self):
        self.state, self.count = None, 0
class Other:
    def act(self, group):
        group.count += 1
        for group.state in ():
            pass
"""
    tree = ast.parse(source)
    assert classes_of(tree)["Group"] == {"size", "state", "count"}
    assert len(assigned_from_outside(tree, classes_of(tree)["Group"])) == 2


def test_no_class_has_more_than_twenty_attributes(trees: dict[str, ast.Module]) -> None:
    wide = {
        f"{path}: {name}": len(attributes)
        for path, tree in trees.items()
        for name, attributes in classes_of(tree).items()
        if len(attributes) > MAX_ATTRIBUTES
    }
    assert wide == {}


def test_attributes_are_assigned_by_their_class(trees: dict[str, ast.Module]) -> None:
    """An owner of state is the only one who writes it, so that "go to definition" finds every writer."""
    owned = set().union(*(attributes for tree in trees.values() for attributes in classes_of(tree).values()))
    found = [f"{path}, {row}" for path, tree in trees.items() for row in assigned_from_outside(tree, owned)]
    assert found == []


def test_the_class_of_an_object_is_swapped_only_where_users_hold_it(trees: dict[str, ast.Module]) -> None:
    swapped = {
        path for path, tree in trees.items() for node in ast.walk(tree) for t in targets(node) if t.attr == "__class__"
    }
    assert swapped == set(SWAPPED)


def test_the_core_stays_small_and_explained() -> None:
    folders = by_folder()
    core = [folders[name] for name in CORE]
    code = sum(lines.code for lines in core)
    assert code <= MAX_CODE_LINES and sum(lines.files for lines in core) <= MAX_FILES
    assert sum(lines.comments for lines in core) >= MIN_COMMENTS * code

"""Importing the engine changes of torch what torch_shims.py says, and nothing for tensors that are not the engine's."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from megatron.core.distributed.fsdp.dtensor import torch_shims
from tests.support.models import make_net, shard_net
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)
REPOSITORY = Path(__file__).resolve().parents[5]

# What the engine may change, as the program below names it: functions and methods by identity, their own and their code's.
SHIMS = {
    "torch.distributed.tensor.DTensor.__new__",
    "torch.distributed.tensor.DTensor.from_local",
    *(
        f"torch.distributed.{home}.distribute_tensor"
        for home in ("tensor", "tensor._api", "tensor.parallel.style", "_state_dict_utils")
    ),
    "torch.distributed.tensor._dtensor_spec.DTensorSpec._verify_shard_order",
    "torch.distributed.tensor._redistribute._gen_transform_infos_non_cached",
    "torch.distributed.tensor._utils._compute_local_shape_and_global_offset",
    "torch.distributed._state_dict_utils._broadcast_tensors",
    "torch.autograd._engine_run_backward",
}
ENGINE = REPOSITORY / "megatron" / "core" / "distributed" / "fsdp"
ONLY_FILE = "dtensor/torch_shims.py"
MOST_SHIMS = 5
# Outside of the core, and only while a report records: it refuses a second profiler, which would end the process.
ONLY_IN_A_SCOPE = {"overlap_report/recorder.py"}

PROGRAM = """
import inspect, json, sys
import torch, torch._dynamo, torch.distributed.tensor, torch.distributed.fsdp, torch.distributed.checkpoint.state_dict
from torch.distributed.tensor import DTensor

def code_of(value):
    value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    value = value.fget if isinstance(value, property) else value
    return value, getattr(value, "__code__", None)

def functions():
    found = {}
    for module_name, module in list(sys.modules.items()):
        if module is None or not module_name.startswith("torch."):
            continue
        for name, value in list(vars(module).items()):
            if inspect.isclass(value) and value.__module__.startswith("torch"):
                for key, member in list(vars(value).items()):
                    if callable(member) or isinstance(member, (staticmethod, classmethod, property)):
                        found[f"{value.__module__}.{value.__qualname__}.{key}"] = code_of(member)
            elif callable(value):
                home = getattr(value, "__module__", None) or module_name
                found[f"{module_name}.{name}"] = code_of(value)
    return found

def tables():
    dispatcher = DTensor._op_dispatcher
    propagator = dispatcher.sharding_propagator
    return {
        "handlers": dict(dispatcher._custom_op_handlers),
        "dispatcher": (type(dispatcher), {key: id(value) for key, value in vars(dispatcher).items()}),
        "propagator": (type(propagator), {key: id(value) for key, value in vars(propagator).items()}),
        "rules": [len(value) for value in vars(propagator).values() if isinstance(value, dict)],
    }

before, tables_before = functions(), tables()
import megatron.core.distributed.fsdp.fsdp2, megatron.core.distributed.fsdp.huggingface
after, tables_after = functions(), tables()
changed = [
    name for name, (value, code) in before.items()
    if name in after and (after[name][0] is not value or after[name][1] is not code)
]
print(json.dumps({"changed": sorted(changed), "tables": [k for k in tables_before if tables_before[k] != tables_after[k]]}))
"""


def test_importing_the_engine_changes_nothing_else_of_torch() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tables"] == [], "torch's dispatcher for DTensors, its handlers and its rules are as they were"
    assert set(found["changed"]) - SHIMS == set()


def _changes_of_torch(source: str) -> list[str]:
    """Find assignments to attributes and items of what is imported from torch, and entries in its private tables."""
    tree = ast.parse(source)
    from_torch = {
        alias.asname or (alias.name if isinstance(node, ast.ImportFrom) else alias.name.split(".")[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).split(".")[0] == "torch"
    }

    def is_torchs(value: ast.expr) -> bool:
        root = value
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        return isinstance(root, ast.Name) and root.id in from_torch

    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            changed = is_torchs(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "_replace"):
            changed = is_torchs(node.args[0])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            writes = node.func.attr in ("append", "extend", "insert", "register", "setdefault", "update", "__setitem__")
            table = ast.unparse(node.func.value)
            changed = writes and is_torchs(node.func.value) and any(part[0] == "_" for part in table.split("."))
            changed |= table.rpartition(".")[2] == "patch" and bool(node.args) and is_torchs(node.args[0])
        else:
            continue
        if changed:
            found.append(ast.unparse(node))
    return found


def test_changes_of_torch_are_found() -> None:
    source = """
import torch
import torch.distributed._x as x
from torch.y import Z, _table
torch.autograd.f = 1
setattr(Z, "name", 2)
_table.append(3)
x.names["a"] = 4
torch._C._t.register(5)
torch.serialization.add_safe_globals([6])
patch.object(Z, "name", 7)
patch.object(own, "name", 8)
own.f = torch.f
"""
    expected = {
        "torch.autograd.f",
        "setattr(Z, 'name', 2)",
        "_table.append(3)",
        "x.names['a']",
        "torch._C._t.register(5)",
        "patch.object(Z, 'name', 7)",
    }
    assert set(_changes_of_torch(source)) == expected


def test_only_one_file_of_the_engine_changes_torch() -> None:
    found = {
        str(path.relative_to(ENGINE)): _changes_of_torch(path.read_text()) for path in sorted(ENGINE.rglob("*.py"))
    }
    assert {name for name, changes in found.items() if changes} == {ONLY_FILE, *ONLY_IN_A_SCOPE}


def test_shims_of_torch_are_few() -> None:
    """Each is a row of the file's table with its reason and the condition for its deletion, and names what it changes."""
    rows = [line.split("|")[1:-1] for line in (torch_shims.__doc__ or "").splitlines() if line.startswith("| ")][1:]
    assert len(rows) <= MOST_SHIMS and all(len(row) == 3 and all(cell.strip() for cell in row) for row in rows)
    named = "".join(row[0] for row in rows)
    changed = _changes_of_torch((ENGINE / ONLY_FILE).read_text())
    functions = {name.rpartition(".")[2] for name in SHIMS}
    assert {
        name for name in functions if name not in named and not name.startswith(("_gen_transform", "_verify"))
    } == set()
    assert len([change for change in changed if not change.startswith("torch._library")]) <= len(functions)


@CHECKS.on(2)
def plain_dtensors_stay_plain_and_take_torchs_path() -> None:
    shard_net(make_net(2))  # the engine is there, and at work
    mesh = init_device_mesh("cpu", (2,))
    for placement in (Replicate(), Shard(0), Partial()):
        tensor = DTensor.from_local(torch.ones(2, 3), mesh, [placement], run_check=False)
        results = [tensor, tensor * 2, tensor.sum(), tensor.detach(), torch.zeros_like(tensor)]
        results += [tensor.redistribute(placements=[Replicate()]), *torch._foreach_add([tensor, tensor], 1)]
        assert {type(result) for result in results} == {DTensor}
    whole = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    assert type(distribute_tensor(whole, mesh, [Shard(0)])) is DTensor
    leaf: Any = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    leaf.redistribute(placements=[Replicate()]).square().sum().backward()
    assert type(leaf.grad) is DTensor


@CHECKS.on(2)
def plain_dtensors_next_to_a_model_of_the_engine_are_filled_and_counted_as_by_torch() -> None:
    mesh = init_device_mesh("cpu", (2,))
    shard_net(make_net(2))
    tensor = DTensor.from_local(torch.zeros(2, 3), mesh, [Replicate()], run_check=False)
    version = tensor._version
    torch._foreach_mul_([tensor], 2.0)
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="random operators may not have complete support"):
        tensor.uniform_()
    assert tensor._version == version + 1, "torch does not count the operation on a list"


@CHECKS.on(2)
def plain_weights_next_to_plain_tensors_have_torchs_error() -> None:
    mesh = init_device_mesh("cpu", (2,))
    weight = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False)
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
        weight + torch.ones(4, 3)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)

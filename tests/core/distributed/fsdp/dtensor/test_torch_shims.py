"""Importing the engine changes of torch what torch_shims.py says, and nothing for tensors that are not the engine's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

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
    "torch.distributed.tensor._redistribute._get_flattened_mesh_by_layout",
    "torch.distributed.tensor._utils._compute_local_shape_and_global_offset",
    "torch.distributed._state_dict_utils._broadcast_tensors",
    "torch.distributed._state_dict_utils._distribute_tensors",
}

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

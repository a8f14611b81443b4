"""The core trains without the packages around it."""

from __future__ import annotations

import subprocess
import sys

# The package itself imports its public names, so an empty one takes its place.
TRAIN = """
import importlib.util, sys, types
import torch

NAME = "megatron.core.distributed.fsdp"
AROUND = ("adapter", "checks", "compat", "fastest_transport", "foreign_optimizers", "fsdp2", "huggingface")


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(tuple(f"{NAME}.{package}" for package in AROUND)):
            raise ImportError(f"{name} is not of the core")


import megatron.core.distributed as above
package = types.ModuleType(NAME)
package.__path__ = [f"{above.__path__[0]}/fsdp"]
sys.modules[NAME] = package
sys.meta_path.insert(0, Blocked())

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from megatron.core.distributed.fsdp.api.fully_shard import fully_shard
from megatron.core.distributed.fsdp.api.optimizer import fully_shard_optimizer
from megatron.core.distributed.fsdp.api.module import microbatch
from megatron.core.distributed.fsdp.config.engine_options import EngineOptions
from megatron.core.distributed.fsdp.config.placement import strategy_placements

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
net, data = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(2, 4, 3)
whole = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
whole.load_state_dict(net.state_dict())
mesh, placements = init_device_mesh("cpu", (1,)), strategy_placements("optim_grads_params", 0)
for module in (net[0], net[2], net):
    fully_shard(module, mesh, placements, options=EngineOptions(poisons=True))
optimizers = [fully_shard_optimizer(torch.optim.AdamW(net.parameters())), torch.optim.AdamW(whole.parameters())]
for _ in range(3):
    for index, batch in enumerate(data):
        with microbatch(net, is_first=index == 0, is_last=index == 1):
            net(batch).square().mean().backward()
        whole(batch).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
for own, other in zip(net.parameters(), whole.parameters(), strict=True):
    assert torch.equal(own.full_tensor(), other), "as the unsharded module"
dist.destroy_process_group()
print("trained")
"""


def test_the_core_trains_without_the_packages_around_it() -> None:
    """Who changes the core need not know the names of other libraries, and may delete these packages."""
    done = subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "trained"), done.stderr

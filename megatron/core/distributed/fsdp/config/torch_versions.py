"""The versions of torch that the engine runs on, and all that differs between them."""

from __future__ import annotations

import importlib.util
import os
import re
import warnings

import torch

# The shims of DTensor (dtensor/torch_shims.py) wrap private functions, and were tried with these.
# To admit a version: run tests/core/distributed/fsdp with it, then change this and setup.py.
OLDEST, NEWEST = (2, 11), (2, 13)
ALLOW_UNTRIED = "MEGATRON_FSDP_ALLOW_UNTRIED_TORCH"


def check_torch_version(version: str) -> None:
    """Refuse versions of torch that the engine was not tried with; with ``ALLOW_UNTRIED=1`` in the environment, warn.

    Raises:
        ImportError: the version is older or newer, and the environment does not allow it.
    """
    major, minor = re.findall(r"\d+", version)[:2]
    if OLDEST <= (int(major), int(minor)) <= NEWEST:
        return
    message = (
        f"torch must be a version from {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, with which the engine's patches of "
        f"DTensor were tried, got {version}; install one of these, or set {ALLOW_UNTRIED}=1 to try with a warning"
    )
    if os.environ.get(ALLOW_UNTRIED) != "1":
        raise ImportError(message)
    warnings.warn(message, RuntimeWarning, stacklevel=2)


# At import, before anything private of torch is imported.
check_torch_version(torch.__version__)

# Builds for CPUs come without it.
HAS_TRITON = importlib.util.find_spec("triton") is not None

# Whether torch redistributes a tensor with parts of a norm where one with parts of a sum is expected; torch 2.11 raises.
# Delete this when torch 2.11 is no longer served.
_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
REDUCES_MIXED_PARTIALS = _VERSION > (2, 11)
# Before 2.13 torch runs its own dispatcher also for a subclass of DTensor that has __torch_dispatch__, unless a rule names operation
# and class. Delete this with 2.12.
NEEDS_DISPATCH_RULES = _VERSION < (2, 13)

# The first DTensor would import dynamo, and torch.fx.wrap, which runs during that import, leaves a cycle that holds the
# frames of all callers: the first model would not be freed until the garbage collector runs. Delete this line when
# torch.fx.wrap no longer holds its frame, or DTensor no longer imports dynamo.
import torch._dynamo  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as funcol  # noqa: E402
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions  # noqa: E402
from torch.distributed import ProcessGroup, ReduceOp  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402

# 2.13 renames the flat collectives and warns about the old names, which are the only ones in 2.11.
all_gather_functional = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
_gather = getattr(ProcessGroup, "all_gather_single", None) or ProcessGroup._allgather_base
_reduce_scatter = getattr(ProcessGroup, "reduce_scatter_single", None) or ProcessGroup._reduce_scatter_base


_GATHER, _SUM = AllgatherOptions(), ReduceScatterOptions()
_GATHER.asyncOp = _SUM.asyncOp = False
_SUM.reduceOp = ReduceOp.SUM  # type: ignore[assignment]


def all_gather_flat(group: ProcessGroup, full: torch.Tensor, shard: torch.Tensor) -> None:
    """Fill ``full`` with all ranks' ``shard`` in rank order, on the current stream. Ranks: all of the process group.

    Calls the process group's own method: the functions of torch.distributed take several times its time on the host.
    """
    work = _gather(group, full, shard, _GATHER)
    if work is not None:  # a backend that does not order its work by itself
        work.wait()


def reduce_scatter_flat(group: ProcessGroup, shard: torch.Tensor, full: torch.Tensor) -> None:
    """Fill ``shard`` with this rank's segment of the sum of all ranks' ``full``, on the current stream. Ranks: all."""
    work = _reduce_scatter(group, shard, full, _SUM)
    if work is not None:
        work.wait()


def concatenated_mesh(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Return the mesh of the axes of several parts of one mesh, in this order; torch does so by a private method.

    Raises:
        RuntimeError: they are parts of different meshes, or overlap; one has no names of axes.
    """
    if any(mesh.mesh_dim_names is None for mesh in meshes):
        raise RuntimeError("axes need names")
    return DeviceMesh._concatenate(meshes)


def flattened_axes(mesh: DeviceMesh) -> dict[str, DeviceMesh]:
    """Return, by name, the axes that ``_flatten`` made of several axes of a mesh; torch keeps them under a private name."""
    return dict(mesh._get_root_mesh()._flatten_mapping)


def existing_group(ranks: list[int], backend: str) -> ProcessGroup | None:
    """Return the first process group of these ranks, in their order, with this backend, or None; torch lists them in a private table.

    Ranks: pure; groups are made by all of their ranks in one order, so that these find the same.
    """
    groups = dist.distributed_c10d._world.pg_group_ranks
    return next((g for g in list(groups) if list(groups[g]) == ranks and dist.get_backend(g) == backend), None)


def spans_all_ranks(mesh: DeviceMesh) -> bool:
    """Return whether the mesh that this is a part of holds all ranks, which torch needs to make groups for it."""
    return mesh._get_root_mesh().mesh.numel() == dist.get_world_size()


# torch.compile leaves the engine's frames alone and compiles the modules' own, as it does around FSDP2's hooks: traced,
# gathers and releases would be baked into graphs as they happened once.
torch._dynamo.trace_rules.add("megatron.core.distributed.fsdp")

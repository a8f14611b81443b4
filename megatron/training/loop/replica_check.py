"""Comparison of the weights of replicas, which must be the same bit by bit."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.distributed.fsdp import contexts_of


def check_replicas(model: torch.nn.Module) -> None:
    """Compare digests of the weights that data-parallel ranks compute with, unit by unit, as they are gathered.

    Raises:
        RuntimeError: some differ; names them, on all ranks.

    Ranks: all; blocks. Each copies its weights to the host.
    Source: Megatron-LM's check_param_hashes_across_dp_replicas.
    """
    differing: set[str] = set()
    for group, own in _digests(model).items():
        of_ranks: list[Any] = [None] * group.size()
        dist.all_gather_object(of_ranks, own, group=group)
        differing |= {name for name in own if len({digests[name] for digests in of_ranks}) > 1}
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, sorted(differing))
    if names := sorted({name for names in of_all for name in names}):
        raise RuntimeError(
            f"weights of replicas must be the same, got different ones in {len(names)} groups: {'; '.join(names[:8])}; run "
            "with --fsdp-debug, or compare with one rank by tools/audit.py"
        )


def _digests(model: torch.nn.Module) -> dict[ProcessGroup, dict[str, str]]:
    """Return digests by name, for each process group whose ranks must have the same."""
    found: dict[ProcessGroup, dict[str, str]] = {}
    for context in contexts_of(model):
        context.finish_updates()
        for unit in context.units:
            context.unshard(unit.groups)
            if context.device.type == "cuda":
                torch.cuda.synchronize(context.device)
            for group in unit.own_groups:
                weights = group.weights
                digest = _digest(weights.full.local)
                for axis, transport in enumerate(weights.full.axes):
                    if transport.size > 1:
                        replicas = weights.group_mesh.mesh.get_group(axis)
                        found.setdefault(replicas, {})[str(group)] = digest
            context.reshard(unit.groups)
    return found


def _digest(local: torch.Tensor) -> str:
    data: Any = local.detach().to("cpu", copy=True).view(torch.uint8).numpy()
    return hashlib.sha256(data).hexdigest()

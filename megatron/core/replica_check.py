"""Comparison of weights between the ranks that hold the same ones."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from megatron.core import parallel_state


def check_param_hashes_across_dp_replicas(model: Sequence[torch.nn.Module], cross_check: bool = False) -> bool:
    """Return whether this rank's weights are those of all other ranks that hold the same ones.

    Sharded weights have one owner, and their bytes are not compared; weights of ``no_shard`` and of plain modules are.

    Args:
        cross_check: accepted; each rank is always compared with all.

    Raises:
        AssertionError: there are no default process groups.

    Ranks: all of the data-parallel groups; blocks the host.
    """
    groups = {
        False: parallel_state.get_data_parallel_group(with_context_parallel=True),
        True: parallel_state.get_expert_data_parallel_group(),
    }
    matches = True
    for is_expert, group in groups.items():
        digest = hashlib.sha256()
        for chunk in model:
            for name, parameter in chunk.named_parameters():
                if getattr(parameter, "allreduce", True) is is_expert or _is_sharded(parameter):
                    continue
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                digest.update(name.encode())
                digest.update(local.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        matches &= _is_same(digest.hexdigest(), group)
    return matches


def _is_sharded(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) and not all(placement.is_replicate() for placement in parameter.placements)


def _is_same(value: str, group: ProcessGroup) -> bool:
    found: list[str] = [""] * group.size()
    dist.all_gather_object(found, value, group=group)
    return len(set(found)) == 1

"""Megatron-Core's functions that make process groups, for callers that make some of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from megatron.core.process_groups_config import nccl_options


def get_nccl_options(pg_name: str, nccl_comm_cfgs: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return the options of NCCL communicators of the group of this name; None where there are none.

    Args:
        nccl_comm_cfgs: by name of a group, ``is_high_priority_stream`` and fields of NCCL's configuration such as ``max_ctas``.

    Raises:
        ValueError: a setting is unknown, or torch has no NCCL.
    """
    settings = nccl_comm_cfgs.get(pg_name)
    return None if settings is None else nccl_options(settings)


def overwrite_nccl_comm_cfgs(
    nccl_comm_cfgs: dict[str, dict[str, Any]], pg_name: str, key_value_pair: tuple[str, Any]
) -> None:
    """Set one (setting, value) of the group of this name in place."""
    nccl_comm_cfgs.setdefault(pg_name, {})[key_value_pair[0]] = key_value_pair[1]


def create_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
) -> ProcessGroup:
    """Make a process group; ``torch.distributed.new_group`` says who must call."""
    group: ProcessGroup = dist.new_group(
        None if ranks is None else list(ranks),
        timeout=timeout,
        backend=backend,
        pg_options=pg_options,
        use_local_synchronization=use_local_synchronization,
        group_desc=group_desc,
    )
    return group


def update_pg_timeout(timeout: timedelta, pg: ProcessGroup | None = None) -> None:
    """Let collectives of a process group wait this long for a rank; None: of all of this process's groups.

    Ranks: all of the group; blocks the host until what runs is done.
    """
    dist.barrier(pg)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for group in [pg] if pg is not None else list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timeout, group)


def create_hierarchical_groups(
    rank: int,
    ranks: Sequence[int],
    hierarchical_group_sizes: Sequence[int],
    create_gloo_process_groups: bool = False,
    pg_options: Any = None,
    timeout: timedelta | None = None,
    group_desc: str | None = None,
) -> tuple[list[ProcessGroup], list[ProcessGroup | None]]:
    """Make groups of several levels over ``ranks``; return those of ``rank``, level by level, and their copies on gloo.

    Groups of the first level have neighbours; those of each further level have the ranks that are at the same place in the groups
    before. With sizes [2, 4], eight ranks make [0, 1], [2, 3], [4, 5], [6, 7] and [0, 2, 4, 6], [1, 3, 5, 7].

    Args:
        pg_options: of all levels, or a list with those of each.

    Raises:
        ValueError: the sizes do not multiply to the number of ranks.

    Ranks: all of the run.
    """
    sizes = list(hierarchical_group_sizes)
    if int(np.prod(sizes)) != len(ranks):
        raise ValueError(f"hierarchical_group_sizes must multiply to the {len(ranks)} ranks, got {sizes}")
    options = pg_options if isinstance(pg_options, list) else [pg_options] * len(sizes)
    grid = np.array(ranks).reshape(sizes[::-1])  # in an array the last axis varies fastest
    own: list[ProcessGroup] = []
    own_gloo: list[ProcessGroup | None] = []
    for level, size in enumerate(sizes):
        axis = len(sizes) - 1 - level
        for members in np.moveaxis(grid, axis, -1).reshape(-1, size).tolist():
            description = f"HIERARCHICAL_{group_desc}_L{level}"
            made = create_group(members, timeout, pg_options=options[level], group_desc=description)
            gloo = create_group(members, timeout, backend="gloo") if create_gloo_process_groups else None
            if rank in members:
                own.append(made)
                own_gloo.append(gloo)
    return own, own_gloo


def create_hybrid_dp_cp_groups(rank: int, ranks: Sequence[int], pg_options: Any = None) -> dict[int, ProcessGroup]:
    """Make groups of 2, 4, ... neighbours, smaller than ``ranks``; return those of ``rank`` by their size.

    Ranks: all of the run.
    """
    own: dict[int, ProcessGroup] = {}
    size = 2
    while 2 * size <= len(ranks):
        for start in range(0, len(ranks), size):
            members = ranks[start : start + size]
            made = create_group(members, pg_options=pg_options, group_desc=f"HYBRID_DP_CP_GROUP_{size}")
            if rank in members:
                own[size] = made
        size *= 2
    return own

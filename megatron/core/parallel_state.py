"""Megatron-Core's entry point for process groups: it returns what it builds, and remembers it for whoever is given no groups.

Nothing but ``FullyShardedDataParallel`` without a ``pg_collection`` reads what is remembered.
"""

from __future__ import annotations

import atexit
from datetime import timedelta

from torch import distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.process_group_builder import build_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rank_grid import RankGrid


class _Initialised:
    """What ``initialize_model_parallel`` built last, and over which default process group."""

    def __init__(self) -> None:
        self.groups: ProcessGroupCollection | None = None
        self.world: ProcessGroup | None = None

    def set(self, groups: ProcessGroupCollection | None) -> None:
        self.groups, self.world = groups, None if groups is None else dist.group.WORLD


_initialised = _Initialised()
# Process groups that are torn down with the interpreter abort it, since they have threads of their own.
atexit.register(_initialised.set, None)


def initialized_process_groups() -> ProcessGroupCollection | None:
    """Return what ``initialize_model_parallel`` built last; None if it was not called since ``init_process_group``."""
    is_alive = dist.is_initialized() and _initialised.world is dist.group.WORLD
    return _initialised.groups if is_alive else None


def model_parallel_is_initialized() -> bool:
    """Return whether ``initialize_model_parallel`` was called since ``init_process_group``."""
    return initialized_process_groups() is not None


def destroy_model_parallel() -> None:
    """Forget the process groups that ``initialize_model_parallel`` built; who uses them destroys them."""
    _initialised.set(None)


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    *,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    num_distributed_optimizer_instances: int = 1,
    distributed_timeout_minutes: int = 30,
    order: str = "tp-cp-ep-dp-pp",
    create_all_gather_group: bool = False,
) -> ProcessGroupCollection:
    """Build the process groups of a run with these degrees; pass them to the model and to the engine.

    There are no ``get_*_group()`` functions, since one process may hold models with different degrees. The collection is
    remembered, until the next call, for ``FullyShardedDataParallel`` without a ``pg_collection``.
    Read ``collection.tp`` and the like, with ``group_size`` and ``group_rank`` of ``process_groups_config``.

    Raises:
        ValueError: the degrees do not fill the world; the message shows the arithmetic.
        RuntimeError: torch.distributed is not initialised.

    Ranks: all, with equal arguments; blocks until the ranks of its groups have come.
    Source: Megatron-Core's function of this name, as far as its arguments are served.
    """
    if not dist.is_initialized():
        ProcessGroupCollection.data_parallel()  # raises an error that says what to call
    grid = RankGrid(
        world_size=dist.get_world_size(),
        tensor_model_parallel_size=tensor_model_parallel_size,
        context_parallel_size=context_parallel_size,
        pipeline_model_parallel_size=pipeline_model_parallel_size,
        expert_model_parallel_size=expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size,
        num_distributed_optimizer_instances=num_distributed_optimizer_instances,
        order=order,
    )
    groups = build_process_groups(
        grid,
        timeout=timedelta(minutes=distributed_timeout_minutes),
        create_all_gather_group=create_all_gather_group,
    )
    _initialised.set(groups)
    return groups

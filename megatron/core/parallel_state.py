"""Megatron-Core's entry point for process groups, without its globals: it returns what it builds."""

from __future__ import annotations

from datetime import timedelta

from torch import distributed as dist

from megatron.core.process_group_builder import build_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rank_grid import RankGrid


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

    Nothing is stored: there are no ``get_*_group()`` functions, since one process may hold models with different degrees.
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
    return build_process_groups(
        grid,
        timeout=timedelta(minutes=distributed_timeout_minutes),
        create_all_gather_group=create_all_gather_group,
    )

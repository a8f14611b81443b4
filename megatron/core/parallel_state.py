"""Megatron-Core's default process groups: what ``initialize_model_parallel`` built, and getters of it.

This is the only module that remembers process groups. Code that is given a ``ProcessGroupCollection``, or a group, never asks it;
layers, models and ``FullyShardedDataParallel`` that are given none take these. Getters without ``initialize_model_parallel`` raise
``NotInitializedError``.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.nccl_settings import NcclSettings
from megatron.core.own_process_group import make_own_group
from megatron.core.process_group_builder import GroupMaker, build_process_groups
from megatron.core.process_group_makers import (
    create_group,
    create_hierarchical_groups,
    create_hybrid_dp_cp_groups,
    get_nccl_options,
    overwrite_nccl_comm_cfgs,
    update_pg_timeout,
)
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.process_groups_config import create_all_gather_groups as create_all_gather_groups_of
from megatron.core.rank_grid import (
    FURTHER_GROUP_NAMES,
    RankGenerator,
    RankGrid,
    UnfitDegreesError,
    generate_masked_orthogonal_rank_groups,
)
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

__all__ = [  # and the getters below
    "RankGenerator",
    "create_group",
    "create_hierarchical_groups",
    "create_hybrid_dp_cp_groups",
    "generate_masked_orthogonal_rank_groups",
    "get_nccl_options",
    "initialize_model_parallel",
    "overwrite_nccl_comm_cfgs",
    "update_pg_timeout",
]


class NotInitializedError(AssertionError, RuntimeError):
    """The groups were asked for before ``initialize_model_parallel``; Megatron-Core raises an AssertionError, too."""


class _Default:
    """What ``initialize_model_parallel`` built last, and over which default process group.

    Attributes:
        further: groups that are not in the collection that the engine takes: those of one rank, and gloo's.
        overrides: ranks and sizes that the ``set_...`` functions set, by (group, "rank" or "size").
        virtual_size, virtual_rank: the stages of each pipeline rank, and the one that is at work; None: one.
    """

    def __init__(self) -> None:
        self.set(None, None, {})
        self.memory_buffer: GlobalMemoryBuffer | None = None
        self.rng_tracker: CudaRNGStatesTracker | None = None

    def set(
        self,
        groups: ProcessGroupCollection | None,
        grid: RankGrid | None,
        further: dict[str, ProcessGroup],
    ) -> None:
        self.groups, self.grid, self.further = groups, grid, further
        self.world = None if groups is None else dist.group.WORLD
        self.overrides: dict[tuple[str, str], int | None] = {}
        self.virtual_size: int | None = None
        self.virtual_rank: int | None = None


_default = _Default()
# Process groups that are torn down with the interpreter abort it, since they have threads of their own.
atexit.register(_default.set, None, None, {})


def initialized_process_groups() -> ProcessGroupCollection | None:
    """Return what ``initialize_model_parallel`` built last; None if it was not called since ``init_process_group``."""
    is_alive = dist.is_initialized() and _default.world is dist.group.WORLD
    return _default.groups if is_alive else None


def is_initialized() -> bool:
    """Return whether ``initialize_model_parallel`` was called since ``init_process_group``."""
    return initialized_process_groups() is not None


model_parallel_is_initialized = is_initialized


def destroy_model_parallel() -> None:
    """Forget the process groups that ``initialize_model_parallel`` built; who uses them destroys them."""
    _default.set(None, None, {})
    destroy_global_memory_buffer()


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_comm_backend: str | None = None,
    use_sharp: bool = False,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: list[int] | None = None,
    hybrid_context_parallel: bool = False,
    expert_model_parallel_size: int = 1,
    gtp_remat_size: int = 1,
    expert_gtp_remat_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    nccl_communicator_config_path: str | None = None,
    distributed_timeout_minutes: int = 30,
    order: str = "tp-cp-ep-dp-pp",
    get_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
    get_position_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
    create_gloo_process_groups: bool = True,
    high_priority_stream_groups: list[str] | None = None,
    sharp_enabled_group: str | None = None,
    rank_offset: int = 0,
    local_world_size: int | None = None,
    *,
    create_all_gather_group: bool = False,
) -> ProcessGroupCollection:
    """Build the process groups of a run with these degrees, and remember them until ``destroy_model_parallel``.

    Args:
        use_sharp: use SHARP for the reductions of one group, if the switches support it. Its communicator is created first and
            is the only one with CollNet (``NCCL_COLLNET_ENABLE=1``).
        sharp_enabled_group: the group for SHARP: "dp" (default; the ranks over which weights are sharded) or "dp_replica" (the
            replicas of the sharded state).
        nccl_communicator_config_path: a YAML file with NCCL communicator options (``max_ctas``, ...) by group name.
        create_gloo_process_groups: where the default backend is another one, also build the data-parallel groups of gloo
            that ``get_data_parallel_group_gloo`` returns.
        get_embedding_ranks, get_position_embedding_ranks: functions that return what the defaults return.
        create_all_gather_group: also build ``dp_cp_ag`` and ``expt_dp_ag``. Ours.

    Returns:
        The collection of the groups that this framework's model and engine take; groups of one rank are None in it where they
        are not used. ``ProcessGroupCollection.use_mpu_process_groups()`` has all.

    Raises:
        ValueError: the degrees do not fill the world; the message shows the arithmetic. The SHARP group does not
            exist; a communicator option is unknown, or the backend is not NCCL.
        NotImplementedError: an argument asks for something that is not served; the message names it and says why.
        RuntimeError: torch.distributed is not initialised, or there are groups already.

    Ranks: all, with equal arguments; blocks until the ranks of its groups have come.
    Source: Megatron-Core's function of this name, with all its arguments in its order; there it returns nothing.
    """
    if not dist.is_initialized():
        raise NotInitializedError(
            "torch.distributed must be initialised before process groups are built; call torch.distributed.init_process_group() "
            "in a program started with torchrun"
        )
    if is_initialized():
        raise RuntimeError(
            "process groups must be built once, got a second call of initialize_model_parallel(); call "
            "destroy_model_parallel() before it"
        )
    given = locals()
    for name, (served, reason) in _NOT_SERVED.items():
        if given[name] not in served:
            raise NotImplementedError(
                f"initialize_model_parallel: {name} must be {served[0]!r}, got {given[name]!r}: {reason}"
            )
    if (virtual_pipeline_model_parallel_size or 1) > 1 and pipeline_model_parallel_size == 1:
        raise UnfitDegreesError(
            "virtual_pipeline_model_parallel_size must go with pipeline_model_parallel_size above 1, got "
            f"{virtual_pipeline_model_parallel_size} and 1: stages of one rank have nobody to take turns with"
        )
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
    if get_embedding_ranks is not None:
        grid = replace(grid, embedding_stages=_embedding_stages(grid, get_embedding_ranks))
    _check_position_embedding_ranks(grid, get_position_embedding_ranks)
    timeout = timedelta(minutes=distributed_timeout_minutes)
    nccl = NcclSettings.of(
        use_sharp=use_sharp, sharp_enabled_group=sharp_enabled_group, config_path=nccl_communicator_config_path
    )
    groups = build_process_groups(grid, timeout=timeout, create_all_gather_group=create_all_gather_group, nccl=nccl)
    further = _further_groups(groups, grid, timeout, nccl, with_gloo=create_gloo_process_groups)
    _default.set(groups, grid, further)
    set_virtual_pipeline_model_parallel_world_size(virtual_pipeline_model_parallel_size)
    set_virtual_pipeline_model_parallel_rank(None if virtual_pipeline_model_parallel_size is None else 0)
    if _default.memory_buffer is None:
        _set_global_memory_buffer()
    return groups


_NOT_SERVED: dict[str, tuple[tuple[object, ...], str]] = {
    "pipeline_model_parallel_comm_backend": ((None, "nccl"), "stages communicate by the default backend"),
    "hierarchical_context_parallel_sizes": ((None, []), "sequences are split over one axis"),
    "hybrid_context_parallel": ((False,), "all sequences are split over all context-parallel ranks"),
    "gtp_remat_size": ((1,), "weights at rest are sharded by the engine, over the data-parallel ranks"),
    "expert_gtp_remat_size": ((1,), "weights at rest are sharded by the engine, over the data-parallel ranks"),
    "high_priority_stream_groups": ((None, []), "the engine's own streams have high priority"),
    "rank_offset": ((0,), "the grid has all ranks of the run"),
    "local_world_size": ((None,), "the grid has all ranks of the run"),
}


def _further_groups(
    groups: ProcessGroupCollection, grid: RankGrid, timeout: timedelta, nccl: NcclSettings, *, with_gloo: bool
) -> dict[str, ProcessGroup]:
    """Build the groups that only Megatron-Core's callers need. Ranks: all; blocks."""
    rank = dist.get_rank()
    further: dict[str, Any] = {"alone": make_own_group([rank], timeout=timeout, group_desc="ALONE")}
    maker = GroupMaker(grid, timeout, dist.group.WORLD, nccl=nccl)
    for name in [*FURTHER_GROUP_NAMES, *(["tp_dp_cp"] if groups.tp_dp_cp is None else [])]:
        if (grid.size(name) > 1 or grid.world_size == 1) and (made := maker.make(name)) is not None:
            further[name] = made
    if with_gloo:
        for name in ("dp", "dp_cp", "expt_dp"):
            group = getattr(groups, name)
            is_gloo = str(dist.get_backend(group)) == "gloo"
            further[f"{name}_gloo"] = group if is_gloo else _gloo(grid, name, timeout)
    return further


def _gloo(grid: RankGrid, name: str, timeout: timedelta) -> ProcessGroup:
    own = make_own_group(grid.ranks(name, dist.get_rank()), timeout=timeout, backend="gloo")
    assert own is not None, "each rank has data-parallel ranks"
    return own


def _embedding_stages(grid: RankGrid, given: Callable[[list[int]], list[int]]) -> tuple[int, ...]:
    """Return which ranks of a pipeline hold the embedding, by a function of the ranks of one."""
    pipelines = grid.groups("pp").tolist()
    found = [[stages.index(rank) if rank in stages else -1 for rank in given(stages)] for stages in pipelines]
    if any(own != found[0] or own[:1] != [0] or -1 in own for own in found):
        raise NotImplementedError(
            "initialize_model_parallel: get_embedding_ranks must return the first rank of a pipeline, and the same further ones of "
            f"each, got {[given(stages) for stages in pipelines]} for {pipelines}"
        )
    return tuple(found[0])


def _check_position_embedding_ranks(grid: RankGrid, given: Callable[[list[int]], list[int]] | None) -> None:
    for stages in grid.groups("pp").tolist():
        if given is not None and list(given(stages)) != default_position_embedding_ranks(stages):
            raise NotImplementedError(
                "initialize_model_parallel: get_position_embedding_ranks must return "
                f"{default_position_embedding_ranks(stages)} for the stages {stages}, got {given(stages)}: the first stage has "
                "the learned positions"
            )


def default_embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
    """Return the ranks of a pipeline that hold the word embedding: the first and the last."""
    return [pp_ranks[0]] if len(pp_ranks) == 1 else [pp_ranks[0], pp_ranks[-1]]


def default_position_embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
    """Return the ranks of a pipeline that hold the learned positions: the first."""
    return [pp_ranks[0]]


def create_all_gather_groups(
    for_expert_parallelism: bool = False,
    timeout: timedelta | None = None,
    nccl_comm_cfgs: dict[str, dict[str, Any]] | None = None,
) -> tuple[ProcessGroup, ProcessGroup | None]:
    """Make separate process groups for the all-gathers of the default groups; see ``process_groups_config``'s function."""
    groups, _ = _initialised()
    return create_all_gather_groups_of(for_expert_parallelism, timeout, nccl_comm_cfgs, pg_collection=groups)


# ---- groups ---------------------------------------------------------------------------------------------------------


def _initialised() -> tuple[ProcessGroupCollection, RankGrid]:
    groups = initialized_process_groups()
    if groups is None or _default.grid is None:
        raise NotInitializedError(
            "process groups must be built before they are asked for; call parallel_state.initialize_model_parallel(), or pass a "
            "ProcessGroupCollection"
        )
    return groups, _default.grid


# Groups that are others where there are no replicas of the sharded state, or no tensor parallelism of weights at rest.
_SAME_AS = {
    "intra_dp_cp": "dp_cp",
    "intra_expt_dp": "expt_dp",
    "dp_cp_gtp_remat": "dp_cp",
    "expt_dp_gtp_remat": "expt_dp",
    "tp_ep_pp_with_egtp_remat": "tp_ep_pp",
}
_NEVER_BUILT = ("hcp", "dp_cp_ag", "expt_dp_ag")


def group_named(name: str) -> ProcessGroup | None:
    """Return this rank's default group by its name in ``ProcessGroupCollection``; None where the rank is in none.

    Raises:
        NotInitializedError: ``initialize_model_parallel`` was not called.
    """
    groups, grid = _initialised()
    found: ProcessGroup | None = getattr(groups, name, None) or _default.further.get(name)
    if found is not None or name in _NEVER_BUILT:
        return found
    if name in _SAME_AS:
        return group_named(_SAME_AS[name])
    if name == "embd":
        return _default.further["alone"] if grid.pipeline_model_parallel_size == 1 else None
    if name == "pos_embd":
        return _default.further["alone"] if get_pipeline_model_parallel_rank() == 0 else None
    return _default.further["alone"]


def _get(name: str, check_initialized: bool = True) -> Any:
    if not check_initialized and not is_initialized():
        return None
    group = group_named(name)
    if group is None and check_initialized:
        raise NotInitializedError(f"this rank must be in a group {name!r} to ask for it, got a middle pipeline stage")
    return group


def has_separate_all_gather_group() -> bool:
    """Return whether ``initialize_model_parallel`` also built separate process groups for all-gathers. Ranks: each alone."""
    groups = initialized_process_groups()
    return groups is not None and groups.dp_cp_ag is not None


def get_data_parallel_group(
    with_context_parallel: bool = False,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
    *,
    independent_all_gather: bool = False,
) -> ProcessGroup:
    """Return the ranks that compute different samples; with context parallelism also those that share them.

    Args:
        with_gtp_remat: accepted; weights at rest are not split over ranks of a kind of their own.
        partial_data_parallel: under hybrid sharding, the ranks of one replica; goes with ``with_context_parallel``.
        independent_all_gather: return these ranks' separate group for all-gathers; needs ``with_context_parallel`` if context
            parallelism is used. Under hybrid sharding its ranks are those of one replica.

    Raises:
        ValueError: the arguments contradict each other.
        NotInitializedError: there are no groups, or no separate group for all-gathers.
    """
    if independent_all_gather:
        if not with_context_parallel and _initialised()[1].context_parallel_size > 1:
            raise ValueError(
                "independent_all_gather must go with with_context_parallel=True where sequences are split, got False: weights are "
                "gathered over data- and context-parallel ranks"
            )
        if not has_separate_all_gather_group():
            raise NotInitializedError(
                "a separate process group for all-gathers must be built first; pass create_all_gather_group=True to "
                "initialize_model_parallel"
            )
        separate: ProcessGroup = _get("dp_cp_ag")
        return separate
    if partial_data_parallel and not with_context_parallel:
        raise ValueError("partial_data_parallel must go with with_context_parallel=True, got False")
    group: ProcessGroup = _get("intra_dp_cp" if partial_data_parallel else "dp_cp" if with_context_parallel else "dp")
    return group


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup:
    """Return the data-parallel group on gloo; of one replica only where there is one."""
    if partial_data_parallel and _initialised()[1].num_distributed_optimizer_instances > 1:
        raise NotImplementedError(
            "partial_data_parallel must be False with several replicas, got True: it is not built"
        )
    return _gloo_group("dp_cp" if with_context_parallel else "dp")


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    """Return the expert data-parallel group on gloo; of one replica only where there is one."""
    if partial_expert_data_parallel and _initialised()[1].num_distributed_optimizer_instances > 1:
        raise NotImplementedError("partial_expert_data_parallel must be False with several replicas, got True")
    return _gloo_group("expt_dp")


def _gloo_group(name: str) -> ProcessGroup:
    _initialised()
    if f"{name}_gloo" not in _default.further:
        raise NotInitializedError("gloo groups must be built first; pass create_gloo_process_groups=True")
    return _default.further[f"{name}_gloo"]


def get_expert_data_parallel_group(
    check_initialized: bool = True, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> ProcessGroup:
    """Return the ranks that hold the same experts; arguments as for ``get_data_parallel_group``."""
    group: ProcessGroup = _get("intra_expt_dp" if partial_expert_data_parallel else "expt_dp", check_initialized)
    return group


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> ProcessGroup:
    """Return the ranks of one pipeline stage; without ``with_context_parallel`` those with one part of the sequences."""
    group: ProcessGroup = _get("tp_dp_cp" if with_context_parallel else "tp_dp", check_initialized)
    return group


def get_amax_reduction_group(with_context_parallel: bool = False, tp_only_amax_red: bool = False) -> ProcessGroup:
    """Return the ranks over which the largest absolute values of FP8 tensors are reduced."""
    if tp_only_amax_red:
        name = "tp_cp" if with_context_parallel else "tp"
    else:
        name = "tp_dp_cp" if with_context_parallel else "tp_dp"
    group: ProcessGroup = _get(name)
    return group


def get_expert_tensor_model_pipeline_parallel_group(
    check_initialized: bool = True, with_egtp_remat: bool = False
) -> ProcessGroup:
    """Return the ranks of one copy of all experts."""
    group: ProcessGroup = _get("tp_ep_pp", check_initialized)
    return group


def get_hybrid_data_context_parallel_groups(check_initialized: bool = True, group_size: int | None = None) -> Any:
    """Return ``dp_cp`` for its own size.

    Raises:
        NotImplementedError: another size: all sequences are split over all context-parallel ranks.
    """
    whole = _get("dp_cp", check_initialized)
    if whole is not None and group_size != whole.size():
        raise NotImplementedError(f"group_size must be {whole.size()}, got {group_size}: there are no smaller groups")
    return whole


def _getter(name: str) -> Callable[..., Any]:
    def get(check_initialized: bool = True) -> Any:
        return _get(name, check_initialized)

    get.__doc__ = f"""Return ``group_named({name!r})``.

    Args:
        check_initialized: False: None instead of an error where there is none.
    """
    return get


get_tensor_model_parallel_group = _getter("tp")
get_pipeline_model_parallel_group = _getter("pp")
get_model_parallel_group = _getter("mp")
get_context_parallel_group = _getter("cp")
get_embedding_group = _getter("embd")
get_position_embedding_group = _getter("pos_embd")
get_tensor_and_context_parallel_group = _getter("tp_cp")
get_expert_model_parallel_group = _getter("ep")
get_expert_tensor_parallel_group = _getter("expt_tp")
get_expert_tensor_and_model_parallel_group = _getter("tp_ep")
get_inter_distributed_optimizer_instance_group = _getter("inter_dist_opt")
get_intra_distributed_optimizer_instance_group = _getter("intra_dist_opt")
get_gtp_weight_remat_group = _getter("gtp_remat")
get_expert_gtp_weight_remat_group = _getter("expt_gtp_remat")
get_hierarchical_context_parallel_groups = _getter("hcp")


# ---- sizes and ranks ------------------------------------------------------------------------------------------------


def _size(name: str, group: Callable[[], ProcessGroup] | None = None) -> int:
    """Return the size of a group; one that was set takes its place, and without torch.distributed it is 0."""
    override = _default.overrides.get((name, "size"))
    if override is not None:
        return override
    if not dist.is_initialized() and name not in ("tp", "pp"):
        return 0
    return (group() if group else _get(name)).size()


def _rank(name: str, group: Callable[[], ProcessGroup] | None = None) -> int:
    override = _default.overrides.get((name, "rank"))
    if override is not None:
        return override
    if not dist.is_initialized() and name not in ("tp", "pp"):
        return 0
    return (group() if group else _get(name)).rank()


def _set_size(name: str, world_size: int | None) -> None:
    """Let the getter of this size return ``world_size``; None: the group's own again."""
    _default.overrides[name, "size"] = world_size


def _set_rank(name: str, rank: int | None) -> None:
    """Let the getter of this rank return ``rank``; None: the group's own again."""
    _default.overrides[name, "rank"] = rank


get_tensor_model_parallel_world_size = partial(_size, "tp")
get_tensor_model_parallel_rank = partial(_rank, "tp")
get_pipeline_model_parallel_world_size = partial(_size, "pp")
get_pipeline_model_parallel_rank = partial(_rank, "pp")
get_context_parallel_world_size = partial(_size, "cp")
get_context_parallel_rank = partial(_rank, "cp")
get_tensor_and_context_parallel_world_size = partial(_size, "tp_cp")
get_tensor_and_context_parallel_rank = partial(_rank, "tp_cp")
get_expert_model_parallel_world_size = partial(_size, "ep")
get_expert_model_parallel_rank = partial(_rank, "ep")
get_expert_tensor_parallel_world_size = partial(_size, "expt_tp")
get_expert_tensor_parallel_rank = partial(_rank, "expt_tp")
get_expert_tensor_and_model_parallel_world_size = partial(_size, "tp_ep")
get_expert_tensor_and_model_parallel_rank = partial(_rank, "tp_ep")
get_gtp_weight_remat_world_size = partial(_size, "gtp_remat")
get_gtp_weight_remat_rank = partial(_rank, "gtp_remat")
get_expert_gtp_weight_remat_world_size = partial(_size, "expt_gtp_remat")
get_expert_gtp_weight_remat_rank = partial(_rank, "expt_gtp_remat")

set_tensor_model_parallel_world_size = partial(_set_size, "tp")
set_tensor_model_parallel_rank = partial(_set_rank, "tp")
set_pipeline_model_parallel_world_size = partial(_set_size, "pp")
set_pipeline_model_parallel_rank = partial(_set_rank, "pp")
set_data_parallel_rank = partial(_set_rank, "dp")
set_expert_model_parallel_world_size = partial(_set_size, "ep")
set_expert_model_parallel_rank = partial(_set_rank, "ep")
set_expert_tensor_parallel_world_size = partial(_set_size, "expt_tp")
set_expert_tensor_parallel_rank = partial(_set_rank, "expt_tp")


def get_data_parallel_world_size(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    """Return the size of ``get_data_parallel_group``."""
    return _size("dp", partial(get_data_parallel_group, with_context_parallel, with_gtp_remat, partial_data_parallel))


def get_data_parallel_rank(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    """Return this rank's index in ``get_data_parallel_group``."""
    return _rank("dp", partial(get_data_parallel_group, with_context_parallel, with_gtp_remat, partial_data_parallel))


def get_expert_data_parallel_world_size(with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False) -> int:
    """Return the size of ``get_expert_data_parallel_group``."""
    return _size("expt_dp", partial(get_expert_data_parallel_group, True, with_gtp_remat, partial_expert_data_parallel))


def get_expert_data_parallel_rank(with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False) -> int:
    """Return this rank's index in ``get_expert_data_parallel_group``."""
    return _rank("expt_dp", partial(get_expert_data_parallel_group, True, with_gtp_remat, partial_expert_data_parallel))


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Return the stages of each pipeline rank, which take turns; None: one."""
    return _default.virtual_size


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Return what was set last; nothing here reads it: stages know their own ``vp_stage``."""
    return _default.virtual_rank


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Let the getter return another number of stages of each rank."""
    _default.virtual_size = world_size


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Let the getter return another stage of this rank."""
    _default.virtual_rank = rank


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank is the first of its pipeline; with ``ignore_virtual=False``, whether its stage is the first."""
    if not ignore_virtual and _virtual_stage(vp_stage) != 0:
        return False
    return get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank is the last of its pipeline; with ``ignore_virtual=False``, whether its stage is the last."""
    if not ignore_virtual and _virtual_stage(vp_stage) != (_default.virtual_size or 1) - 1:
        return False
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


def _virtual_stage(vp_stage: int | None) -> int:
    if _default.virtual_size is not None and vp_stage is None:
        raise AssertionError(f"vp_stage must say which of the {_default.virtual_size} stages of this rank, got None")
    return vp_stage or 0


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank has the word embedding or its copy; with ``ignore_virtual=False``, whether its stage has."""
    if not is_initialized() or group_named("embd") is None:
        return False
    return ignore_virtual or is_pipeline_first_stage(False, vp_stage) or is_pipeline_last_stage(False, vp_stage)


def is_rank_in_position_embedding_group() -> bool:
    """Return whether this rank's stage has the learned positions."""
    return is_initialized() and group_named("pos_embd") is not None


def get_all_ranks() -> str:
    """Return this rank's indices along the axes tp, weights at rest, dp, cp, pp and ep, joined by "_"."""
    ranks = (_rank(name) for name in ("tp", "gtp_remat", "dp", "cp", "pp", "ep"))
    return "_".join(map(str, ranks))


# ---- global ranks ---------------------------------------------------------------------------------------------------


def _ranks_of(name: str) -> list[int]:
    return list(dist.get_process_group_ranks(_get(name)))


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int] | None:
    """Return the ranks that share this rank's sequences."""
    return _ranks_of("cp") if check_initialized or is_initialized() else None


def get_gtp_weight_remat_global_ranks(check_initialized: bool = True) -> list[int] | None:
    """Return the ranks that split this rank's weights at rest besides the engine's: itself."""
    return _ranks_of("gtp_remat") if check_initialized or is_initialized() else None


def get_expert_gtp_weight_remat_global_ranks(check_initialized: bool = True) -> list[int] | None:
    """Return the ranks that split this rank's experts at rest besides the engine's: itself."""
    return _ranks_of("expt_gtp_remat") if check_initialized or is_initialized() else None


def get_tensor_model_parallel_src_rank() -> int:
    """Return the first rank of the tensor-parallel group."""
    return _ranks_of("tp")[0]


def get_model_parallel_src_rank() -> int:
    """Return the first rank of the model-parallel group."""
    return _ranks_of("mp")[0]


def get_expert_model_parallel_src_rank() -> int:
    """Return the first rank of the expert-parallel group."""
    return _ranks_of("ep")[0]


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Return the first rank of the data-parallel group."""
    return _ranks_of("dp_cp" if with_context_parallel else "dp")[0]


def get_pipeline_model_parallel_first_rank() -> int:
    """Return the rank of the first stage of this rank's pipeline."""
    return _ranks_of("pp")[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Return the rank of the last stage of this rank's pipeline."""
    return _ranks_of("pp")[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Return the rank of the next stage, after the last the first."""
    stages = _ranks_of("pp")
    return stages[(get_pipeline_model_parallel_rank() + 1) % len(stages)]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Return the rank of the previous stage, before the first the last."""
    stages = _ranks_of("pp")
    return stages[(get_pipeline_model_parallel_rank() - 1) % len(stages)]


# ---- scratch memory -------------------------------------------------------------------------------------------------


class GlobalMemoryBuffer:
    """Scratch tensors by name that grow and are used again; nothing here uses them, code written for Megatron-Core may."""

    def __init__(self) -> None:
        self.buffer: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get_tensor(
        self,
        tensor_shape: Sequence[int],
        dtype: torch.dtype,
        name: str,
        mem_alloc_context: Callable[[], Any] | None = None,
    ) -> torch.Tensor:
        """Return memory of this shape, on the current CUDA device or the CPU; it is overwritten by the next call of the name."""
        shape = torch.Size(tensor_shape)
        known = self.buffer.get((name, dtype))
        if known is None or known.numel() < shape.numel():
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
            allocate = partial(torch.empty, shape.numel(), dtype=dtype, device=device)
            if mem_alloc_context is None:
                known = allocate()
            else:
                with mem_alloc_context():
                    known = allocate()
            self.buffer[name, dtype] = known
        return known[: shape.numel()].view(shape)


def _set_global_memory_buffer() -> None:
    """Make the scratch memory.

    Raises:
        AssertionError: it is there already.
    """
    if _default.memory_buffer is not None:
        raise AssertionError("the scratch memory must be made once; call destroy_global_memory_buffer first")
    _default.memory_buffer = GlobalMemoryBuffer()


def get_global_memory_buffer() -> GlobalMemoryBuffer:
    """Return the scratch memory."""
    if _default.memory_buffer is None:
        raise NotInitializedError("the scratch memory must be made first; call initialize_model_parallel")
    return _default.memory_buffer


def destroy_global_memory_buffer() -> None:
    """Free the scratch memory."""
    _default.memory_buffer = None


def default_rank(name: str) -> int:
    """Return this rank's index in a default group, by the group's name; 0 where there are no default groups."""
    return _rank(name) if is_initialized() else _default.overrides.get((name, "rank")) or 0


_DEGREES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
}


def take_default_degrees(config: Any) -> None:
    """Set degrees that a model's configuration leaves at 1 to those of the default groups, which the model is built for.

    Megatron-Core's layers ask their group alone how they are split, so its callers may leave the degrees out.
    """
    groups = initialized_process_groups()
    if groups is None:
        return
    for name, field in _DEGREES.items():
        degree = group_size(getattr(groups, name))
        if degree > 1 and getattr(config, field) == 1:
            setattr(config, field, degree)
    if (_default.virtual_size or 1) > 1 and config.virtual_pipeline_model_parallel_size is None:
        config.virtual_pipeline_model_parallel_size = _default.virtual_size


def default_rng_tracker() -> CudaRNGStatesTracker:
    """Return the random streams of models that are given no process groups."""
    if _default.rng_tracker is None:
        _default.rng_tracker = CudaRNGStatesTracker(default_rank("tp"))
    return _default.rng_tracker


# ---- Megatron-Core's variables --------------------------------------------------------------------------------------

_VARIABLES: dict[str, Callable[[], Any]] = {
    "_TENSOR_MODEL_PARALLEL_GROUP": partial(_get, "tp", False),
    "_PIPELINE_MODEL_PARALLEL_GROUP": partial(_get, "pp", False),
    "_MODEL_PARALLEL_GROUP": partial(_get, "mp", False),
    "_CONTEXT_PARALLEL_GROUP": partial(_get, "cp", False),
    "_DATA_PARALLEL_GROUP": partial(_get, "dp", False),
    "_DATA_PARALLEL_GROUP_WITH_CP": partial(_get, "dp_cp", False),
    "_EMBEDDING_GROUP": partial(_get, "embd", False),
    "_EXPERT_MODEL_PARALLEL_GROUP": partial(_get, "ep", False),
    "_EXPERT_TENSOR_PARALLEL_GROUP": partial(_get, "expt_tp", False),
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": partial(_get, "tp_ep", False),
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": partial(_get, "tp_ep_pp", False),
    "_EXPERT_DATA_PARALLEL_GROUP": partial(_get, "expt_dp", False),
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": partial(_get, "intra_expt_dp", False),
    "_MPU_DATA_PARALLEL_WORLD_SIZE": lambda: _default.overrides.get(("dp", "size")),
    "_MPU_DATA_PARALLEL_RANK": lambda: _default.overrides.get(("dp", "rank")),
}


def __getattr__(name: str) -> Any:
    """Return what Megatron-Core has in a variable of this name; writing to it has no effect here."""
    if name in _VARIABLES:
        return _VARIABLES[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

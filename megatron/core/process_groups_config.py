"""The collection of a run's process groups, which is passed to whatever needs it; there are no global process groups."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.own_process_group import make_own_group


def group_size(group: ProcessGroup | None) -> int:
    """Return the number of ranks of a process group; 1 for None, which means that the split is not used."""
    return 1 if group is None else group.size()


def group_rank(group: ProcessGroup | None) -> int:
    """Return this rank's index in a process group; 0 for None."""
    return 0 if group is None else group.rank()


_NOT_SERVED = {
    "hcp": "sequences are split over one axis; use cp",
    "gtp_remat": "weights at rest are sharded by the engine; use dp_cp",
    "expt_gtp_remat": "weights at rest are sharded by the engine; use expt_dp",
}


@dataclass(kw_only=True, repr=False)
class ProcessGroupCollection:
    """The process groups of this rank, one for each kind of parallelism; None where it is not used.

    Attributes:
        tp, pp, cp, ep: tensor, pipeline, context and expert parallelism.
        mp: tensor and pipeline together.
        dp, dp_cp: data parallelism of dense parameters, without and with context parallelism.
        tp_cp: tensor and context parallelism together.
        tp_dp_cp: all ranks of a pipeline stage, where there are several that are split over ``tp``.
        expt_tp, expt_dp: tensor and data parallelism of expert parameters.
        tp_ep: tensor parallelism of experts and expert parallelism together.
        embd: the first and the last pipeline stage, which share the word embedding; None on other stages.
        intra_dp_cp, intra_expt_dp: the inner (sharding) axis of hybrid sharding, dense and expert.
        inter_dist_opt, inter_expt_dist_opt: its outer (replicating) axis, dense and expert.
        dp_cp_ag, expt_dp_ag: the ranks of ``dp_cp`` and ``expt_dp`` (under hybrid sharding those of the inner axes), for
            all-gathers alone.
        pos_embd, tp_ep_pp, intra_dist_opt, dp_cp_gtp_remat, expt_dp_gtp_remat, tp_ep_pp_with_egtp_remat: groups
            of Megatron-Core that nothing here reads; ``use_mpu_process_groups`` sets them for its callers.
        hcp, gtp_remat, expt_gtp_remat: hierarchical context parallelism and tensor parallelism of weights at rest, which
            are not served: groups of several ranks are refused.

    Whoever made the process groups destroys them.

    Raises:
        NotImplementedError: ``hcp``, ``gtp_remat`` or ``expt_gtp_remat`` is set to a group of several ranks.
    """

    tp: ProcessGroup | None = None
    pp: ProcessGroup | None = None
    cp: ProcessGroup | None = None
    ep: ProcessGroup | None = None
    mp: ProcessGroup | None = None
    dp: ProcessGroup | None = None
    dp_cp: ProcessGroup | None = None
    tp_cp: ProcessGroup | None = None
    tp_dp_cp: ProcessGroup | None = None
    expt_tp: ProcessGroup | None = None
    expt_dp: ProcessGroup | None = None
    tp_ep: ProcessGroup | None = None
    embd: ProcessGroup | None = None
    intra_dp_cp: ProcessGroup | None = None
    intra_expt_dp: ProcessGroup | None = None
    inter_dist_opt: ProcessGroup | None = None
    inter_expt_dist_opt: ProcessGroup | None = None
    dp_cp_ag: ProcessGroup | None = None
    expt_dp_ag: ProcessGroup | None = None
    pos_embd: ProcessGroup | None = None
    tp_ep_pp: ProcessGroup | None = None
    tp_ep_pp_with_egtp_remat: ProcessGroup | None = None
    dp_cp_gtp_remat: ProcessGroup | None = None
    expt_dp_gtp_remat: ProcessGroup | None = None
    intra_dist_opt: ProcessGroup | None = None
    gtp_remat: ProcessGroup | None = None
    expt_gtp_remat: ProcessGroup | None = None
    hcp: ProcessGroup | list[ProcessGroup] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _NOT_SERVED and any(group_size(group) > 1 for group in (value if name == "hcp" else [value]) or ()):
            raise NotImplementedError(
                f"ProcessGroupCollection.{name} must be None, got a group of several ranks: {_NOT_SERVED[name]}"
            )
        super().__setattr__(name, value)

    @classmethod
    def use_mpu_process_groups(cls, required_pgs: Sequence[str] | None = None) -> ProcessGroupCollection:
        """Return a collection of the groups that ``parallel_state.initialize_model_parallel`` built.

        Unlike that function's own collection it also holds groups of one rank, as Megatron-Core's does.

        Args:
            required_pgs: names of the groups; None: all.

        Raises:
            ValueError: there is no group of a name.
            AssertionError: the groups were not built.

        Ranks: local.
        """
        from megatron.core import parallel_state  # which imports this module

        known = [field.name for field in fields(cls)]
        if unknown := [name for name in required_pgs or () if name not in known]:
            raise ValueError(f"required_pgs must be names of process groups, got {unknown}; there are {known}")
        groups: dict[str, Any] = {name: parallel_state.group_named(name) for name in required_pgs or known}
        return cls(**groups)

    def __repr__(self) -> str:
        """Return the groups that there are, with their sizes."""
        given = {one.name: group for one in fields(self) if (group := getattr(self, one.name)) is not None}
        sizes = {n: [one.size() for one in g] if isinstance(g, list) else g.size() for n, g in given.items()}
        return f"ProcessGroupCollection({', '.join(f'{n}({size})' for n, size in sizes.items()) or 'empty'})"

    @staticmethod
    def is_gtp_remat_active(process_group_dict: Mapping[str, ProcessGroup | None]) -> bool:
        """Return whether groups of ``setup_process_groups_for_...`` split weights at rest by ranks of a kind of their own."""
        return any(group_size(process_group_dict.get(f"{name}_group")) > 1 for name in ("gtp_remat", "expt_gtp_remat"))

    @staticmethod
    def setup_process_groups_for_ddp(
        pg_collection: ProcessGroupCollection | None, config: Any, ddp_config: Any
    ) -> dict[str, ProcessGroup | None]:
        """Return the groups that a wrapper for data parallelism needs, by Megatron-Core's names (``dp_group`` and so on).

        Args:
            pg_collection: None: those of ``parallel_state``.
            config, ddp_config: of the model and of the wrapper; they say which groups must be there.

        Raises:
            ValueError: a group is missing.
        """
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        found = groups._data_parallel_groups(config, ddp_config)
        found |= {f"{name}_group": getattr(groups, name) for name in ("tp", "pp", "ep")}
        if not ddp_config.use_distributed_optimizer:
            found["intra_dist_opt_group"] = None
        return found

    @staticmethod
    def setup_process_groups_for_optimizer(
        pg_collection: ProcessGroupCollection | None, model_chunks: Sequence[Any], use_gloo_process_groups: bool = True
    ) -> dict[str, ProcessGroup | None]:
        """Return the groups that an optimizer needs, by Megatron-Core's names (``dp_group``, ``mp_group`` and so on).

        Args:
            pg_collection: None: those of ``parallel_state``.
            use_gloo_process_groups: also return the data-parallel groups of gloo; goes with ``pg_collection=None``.

        Raises:
            ValueError: a group is missing, or groups of gloo are asked for with a ``pg_collection``.
        """
        from megatron.core import parallel_state  # which imports this module

        if pg_collection is not None and use_gloo_process_groups:
            raise ValueError(
                "use_gloo_process_groups must be False with a pg_collection, got True: it has none of gloo"
            )
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        ddp_config = getattr(model_chunks[0], "ddp_config", None)
        found = groups._data_parallel_groups(getattr(model_chunks[0], "config", None), ddp_config)
        found["mp_group"], found["expt_tp_pp_group"] = groups.mp, groups.tp_ep_pp
        found["expt_tp_pp_with_egtp_remat_group"] = groups.tp_ep_pp_with_egtp_remat or groups.tp_ep_pp
        found["intra_dp_cp_group_gloo"] = found["intra_expt_dp_group_gloo"] = None
        if use_gloo_process_groups:
            found["intra_dp_cp_group_gloo"] = parallel_state.get_data_parallel_group_gloo(True, True)
            found["intra_expt_dp_group_gloo"] = parallel_state.get_expert_data_parallel_group_gloo(True)
        return found

    def _data_parallel_groups(self, config: Any, ddp_config: Any) -> dict[str, ProcessGroup | None]:
        if self.dp is None:
            raise ValueError("pg_collection must hold dp, got None")
        if self.dp_cp is None and getattr(config, "context_parallel_size", 1) > 1:
            raise ValueError("pg_collection must hold dp_cp with context_parallel_size above 1, got None")
        whole = self.dp_cp or self.dp
        found: dict[str, ProcessGroup | None] = {
            "dp_group": self.dp,
            "dp_cp_group": whole,
            "expt_dp_group": self.expt_dp or whole,
        }
        found |= {"gtp_remat_group": self.gtp_remat, "expt_gtp_remat_group": self.expt_gtp_remat}
        inner = {"intra_dp_cp_group": whole, "intra_expt_dp_group": found["expt_dp_group"]}
        hybrid: dict[str, ProcessGroup | None] = {"inter_dist_opt_group": None, **inner}
        if getattr(ddp_config, "num_distributed_optimizer_instances", 1) > 1:
            hybrid = {
                f"{name}_group": getattr(self, name) for name in ("inter_dist_opt", "intra_dp_cp", "intra_expt_dp")
            }
            if missing := [name.removesuffix("_group") for name, group in hybrid.items() if group is None]:
                raise ValueError(
                    "pg_collection must hold intra_dp_cp, intra_expt_dp and inter_dist_opt with "
                    f"num_distributed_optimizer_instances above 1, got None in {', '.join(missing)}"
                )
        return {**found, **hybrid, "intra_dist_opt_group": self.intra_dist_opt}

    @classmethod
    def data_parallel(cls) -> ProcessGroupCollection:
        """Make a collection in which all ranks are data-parallel and the model is not split.

        Raises:
            RuntimeError: torch.distributed is not initialised.

        Ranks: all; no communication, since it uses the default process group.
        """
        if not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed must be initialised before process groups are collected; call "
                "torch.distributed.init_process_group() in a program started with torchrun"
            )
        world = dist.group.WORLD
        return cls(dp=world, dp_cp=world)


@dataclass(repr=False)
class MultiModuleProcessGroupCollection:
    """The process groups of the modules of a rank that has several, such as an encoder and a language model, by name.

    Args:
        module_pgs: by the module's name.
        language_model_module_name: the one that is the language model; None if this rank has none.

    Raises:
        ValueError: there are no modules, or none of that name.

    Source: Megatron-Core's class of this name.
    """

    module_pgs: dict[str, ProcessGroupCollection]
    language_model_module_name: str | None = None

    def __post_init__(self) -> None:
        if not self.module_pgs:
            raise ValueError("module_pgs must have a module, got none: it cannot be empty")
        name = self.language_model_module_name
        if name is not None and name not in self.module_pgs:
            raise ValueError(
                f"language_model_module_name must be one of {list(self.module_pgs)}, got {name!r}, which was not found"
            )

    def has_language_model(self) -> bool:
        """Return whether this rank has the language model."""
        return self.language_model_module_name is not None

    def get_language_model_collection(self) -> ProcessGroupCollection:
        """Return the groups of the language model.

        Raises:
            ValueError: this rank has none.
        """
        if self.language_model_module_name is None:
            raise ValueError(
                "this rank must have the language model, got No language model specified; see has_language_model"
            )
        return self.module_pgs[self.language_model_module_name]

    def get_language_model_cp_size(self) -> int:
        """Return how many context-parallel ranks the language model has.

        Raises:
            ValueError: this rank has no language model.
        """
        return group_size(self.get_language_model_collection().cp)

    def get_module_collection(self, module_name: str) -> ProcessGroupCollection:
        """Return the groups of a module.

        Raises:
            ValueError: there is no such module.
        """
        if module_name not in self.module_pgs:
            raise ValueError(
                f"module_name must be one of {list(self.module_pgs)}, got {module_name!r}, which was not found"
            )
        return self.module_pgs[module_name]

    def __len__(self) -> int:
        return len(self.module_pgs)

    def __getitem__(self, module_name: str) -> ProcessGroupCollection:
        return self.module_pgs[module_name]

    def __iter__(self) -> Iterator[ProcessGroupCollection]:
        return iter(self.module_pgs.values())

    def keys(self) -> KeysView[str]:
        """Return the names of the modules."""
        return self.module_pgs.keys()

    def values(self) -> ValuesView[ProcessGroupCollection]:
        """Return the groups of each module."""
        return self.module_pgs.values()

    def items(self) -> ItemsView[str, ProcessGroupCollection]:
        """Return names and groups."""
        return self.module_pgs.items()

    def __repr__(self) -> str:
        """Return the names of the modules, and of the language model."""
        name = self.language_model_module_name
        own = "" if name is None else f", language_model_module_name={name!r}"
        return f"MultiModuleProcessGroupCollection(modules=[{', '.join(self.module_pgs)}]{own})"


def of_one_model(groups: Any) -> ProcessGroupCollection | None:
    """Return the groups of the only model of this rank.

    Raises:
        NotImplementedError: there are several.
    """
    if not isinstance(groups, MultiModuleProcessGroupCollection):
        return groups  # type: ignore[no-any-return]
    if len(groups) > 1:
        raise NotImplementedError(
            f"stages of a pipeline must be of one model, got {groups!r}; run each model by itself"
        )
    return next(iter(groups))


def group_of(groups: ProcessGroupCollection | None, name: str) -> ProcessGroup | None:
    """Return the process group of this name; None where it is not used.

    Args:
        groups: None: those of ``parallel_state``, and where it has none, nothing is split.

    Raises:
        AttributeError: there is no such name.
    """
    if groups is None:
        from megatron.core import parallel_state  # which imports this module

        groups = parallel_state.initialized_process_groups()
    group: ProcessGroup | None = None if groups is None else getattr(groups, name)
    return group


DEFAULT_GROUP: Any = object()
"""Stands for a group that a caller left out, which is then that of ``parallel_state``; None says that there is no split."""


def group_or_default(group: ProcessGroup | None, name: str) -> ProcessGroup | None:
    """Return a group that was given, or the one of this name in ``parallel_state`` for ``DEFAULT_GROUP``."""
    return group_of(None, name) if group is DEFAULT_GROUP else group


def create_all_gather_groups(
    for_expert_parallelism: bool = False,
    timeout: timedelta | None = None,
    nccl_comm_cfgs: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    pg_collection: ProcessGroupCollection | None = None,
) -> tuple[ProcessGroup, ProcessGroup | None]:
    """Make separate process groups for the all-gathers of weights, dense and expert.

    One NCCL communicator runs its collectives one after the other, so gathers and reductions overlap only on two.
    Put them into the collection: ``replace(pg_collection, dp_cp_ag=dense, expt_dp_ag=expert)``.

    Args:
        for_expert_parallelism: also make the expert one, where ``pg_collection`` splits the experts.
        timeout: how long collectives wait for a rank; None: torch.distributed's default.
        nccl_comm_cfgs: settings of NCCL communicators by the name of the process group, "dp_cp" and "ep_dp":
            ``is_high_priority_stream`` and fields of NCCL's configuration such as ``max_ctas``. Other backends
            refuse them.
        pg_collection: the new groups have the ranks of its sharding groups: ``intra_dp_cp`` and ``intra_expt_dp`` under
            hybrid sharding, otherwise ``dp_cp`` (or ``dp``) and ``expt_dp``; None: all ranks.

    Returns:
        (dense, expert) process groups of this rank; the second is None without ``for_expert_parallelism``, or where
        experts are split as dense layers are.

    Raises:
        ValueError: the collection lacks a group; there are settings for a group that is not made or is not NCCL's, or
            unknown settings.
        RuntimeError: torch.distributed is not initialised.

    Ranks: all of the run, whichever groups they are in; blocks until all have called it. The caller destroys the groups.
    Source: Megatron-Core's function of this name, which reads the groups from globals; here they are passed in.
    """
    groups = pg_collection or ProcessGroupCollection.data_parallel()
    dense = groups.intra_dp_cp or groups.dp_cp or groups.dp
    if dense is None:
        raise ValueError("pg_collection must hold a data-parallel group in dp_cp or dp, got None in both")
    expert = groups.intra_expt_dp or groups.expt_dp
    splits_experts = group_size(groups.ep) > 1 or group_size(groups.expt_tp) != group_size(groups.tp)
    has_experts = for_expert_parallelism and splits_experts
    if has_experts and expert is None:
        raise ValueError("pg_collection must hold expt_dp for experts that are split over ep, got None")
    names = {"dp_cp", "ep_dp"} if has_experts else {"dp_cp"}
    if unknown := set(nccl_comm_cfgs or {}) - names:
        raise ValueError(f"nccl_comm_cfgs must be for groups among {sorted(names)}, got {sorted(unknown)}")
    configs = nccl_comm_cfgs or {}
    gathers = _mirror(dense, timeout, configs.get("dp_cp"), "DATA_PARALLEL_GROUP_WITH_CP_AG")
    if not has_experts:
        return gathers, None
    assert expert is not None
    return gathers, _mirror(expert, timeout, configs.get("ep_dp"), "EXPERT_DATA_PARALLEL_GROUP_AG")


def _mirror(
    group: ProcessGroup, timeout: timedelta | None, settings: Mapping[str, Any] | None, description: str
) -> ProcessGroup:
    """Make a new process group of the same ranks. Ranks: all of the run, each with its own ``group``."""
    options = None
    if settings:
        if "nccl" not in str(dist.get_backend_config(group)):
            raise ValueError(f"nccl_comm_cfgs needs groups of the nccl backend, got {dist.get_backend_config(group)}")
        options = nccl_options(settings)
    ranks = sorted(dist.get_process_group_ranks(group))
    made = make_own_group(ranks, timeout=timeout, pg_options=options, group_desc=description)
    assert made is not None, "this rank is in the group"
    return made


def nccl_options(settings: Mapping[str, Any]) -> Any:
    """Return the options of NCCL communicators with these settings.

    Raises:
        ValueError: a setting is unknown, or torch has no NCCL.
    """
    if not dist.is_nccl_available():
        raise ValueError(f"nccl_comm_cfgs needs a torch with NCCL, got one without and the settings {dict(settings)}")
    options = dist.ProcessGroupNCCL.Options()
    for name, value in settings.items():
        owner = options if name == "is_high_priority_stream" else options.config
        if not hasattr(owner, name):
            raise ValueError(f"nccl_comm_cfgs must name settings of NCCL's communicators, got {name!r}")
        setattr(owner, name, value)
    return options

"""The ranks of every process group of a run: pure geometry, without processes.

The ranks form two grids. The axes of the dense grid are tensor (tp), context (cp), data (dp) and pipeline parallelism (pp);
those of the expert grid are tensor parallelism of experts, expert parallelism (ep), data parallelism of experts, and the
same pipeline stages. Where experts are split as dense layers are, the two grids are one. A group has the ranks that differ
on its axes alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from einops import rearrange

Groups = npt.NDArray[np.int64]
"""[G, N]: G groups of N ranks, each in the order of its axes."""

_AXES = ("tp", "cp", "ep", "dp", "pp")

_DENSE_AXES = {
    "tp": ("tp",),
    "cp": ("cp",),
    "pp": ("pp",),
    "mp": ("tp", "pp"),
    "dp": ("dp",),
    "dp_cp": ("dp", "cp"),
    "tp_cp": ("tp", "cp"),
    "tp_dp_cp": ("tp", "dp", "cp"),
}
_EXPERT_AXES = {"ep": ("ep",), "expt_tp": ("tp",), "expt_dp": ("dp",), "tp_ep": ("tp", "ep")}
_HYBRID = {
    "intra_dp_cp": "dp_cp",
    "inter_dist_opt": "dp_cp",
    "intra_expt_dp": "expt_dp",
    "inter_expt_dist_opt": "expt_dp",
}

GROUP_NAMES = (*_DENSE_AXES, *_EXPERT_AXES, *_HYBRID, "embd")
"""The names of all groups of a grid, as in ``ProcessGroupCollection``."""

_FURTHER_DENSE_AXES = {"tp_dp": ("tp", "dp")}
_FURTHER_EXPERT_AXES = {"tp_ep_pp": ("tp", "ep", "pp")}

FURTHER_GROUP_NAMES = (*_FURTHER_DENSE_AXES, *_FURTHER_EXPERT_AXES, "intra_dist_opt")
"""Groups that this framework does not need itself, and code written for Megatron-Core may."""


class UnfitDegreesError(ValueError, RuntimeError):
    """Degrees of parallelism that do not fit the ranks; Megatron-Core raises a RuntimeError."""


@dataclass(frozen=True, kw_only=True)
class RankGrid:
    """The ranks of every group of a run, computed from the degrees of parallelism.

    Raises:
        ValueError: a degree is not positive, the order is malformed, or the degrees do not divide the number of ranks; the
            message shows the arithmetic.

    Ranks: pure; every rank computes the same answer.
    Source: Megatron-Core's parallel_state: its order strings, its two grids, and hybrid sharding's division of the
    data-parallel ranks.
    """

    world_size: int
    tensor_model_parallel_size: int = 1
    context_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    """None: as many as ``tensor_model_parallel_size``."""

    num_distributed_optimizer_instances: int = 1
    """Size of the outer axis of hybrid sharding: the number of replicas of the sharded state."""

    order: str = "tp-cp-ep-dp-pp"
    """The axes, neighbouring ranks first; those of one rank may be left out."""

    embedding_stages: tuple[int, ...] = (0, -1)
    """Ranks of a pipeline that hold the word embedding or a copy of it; negative ones count from the end."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._check_product("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
        self._check_product("expert_tensor_parallel_size", "expert_model_parallel_size", "pipeline_model_parallel_size")
        self._complete_order()
        if not np.array_equal(self._dense_groups(("pp",)), self._expert_groups(("pp",))):
            raise ValueError(
                f"dense and expert layers of a stage must be on the same ranks, got order {self.order!r} with "
                f"{self._before_pp(self.dense_sizes)} ranks before pp for dense layers and "
                f"{self._before_pp(self.expert_sizes)} for expert layers; use an order that ends in pp, or make these equal"
            )
        self._check_instances("data x context", "tensor_model_parallel_size", "pipeline_model_parallel_size")
        of_experts = ("expert_tensor_parallel_size", "expert_model_parallel_size", "pipeline_model_parallel_size")
        self._check_instances("expert data", *of_experts)

    def _check_instances(self, axis: str, *others: str) -> None:
        instances, degrees = self.num_distributed_optimizer_instances, self._degrees(others)
        size = self.world_size // prod(degrees)
        if size % instances:
            raise ValueError(
                f"num_distributed_optimizer_instances must divide the {axis} parallel size, which is the ranks / "
                f"({' * '.join(others)}), got {instances} and {self.world_size} / ({' * '.join(map(str, degrees))}) = {size}; "
                "change a degree or the number of instances"
            )

    def _complete_order(self) -> None:
        names = self.order.lower().split("-")
        missing = [axis for axis in _AXES if axis not in names]
        if sorted([*names, *missing]) != sorted(_AXES):
            raise ValueError(f"order must name tp, cp, ep, dp and pp once each, joined by '-', got {self.order!r}")
        object.__setattr__(self, "order", "-".join([*names, *missing]))
        sizes = {axis: max(self.dense_sizes[axis], self.expert_sizes[axis]) for axis in missing}
        if split := [axis for axis, size in sizes.items() if size > 1]:
            raise ValueError(
                f"order must name all axes of several ranks, got {'-'.join(names)!r} without {', '.join(split)}"
            )

    def _check_product(self, *names: str) -> None:
        degrees = self._degrees(names)
        if self.world_size % prod(degrees):
            raise UnfitDegreesError(
                f"the number of ranks must be a multiple of {' * '.join(names)}, got {self.world_size} ranks and "
                f"{' * '.join(map(str, degrees))} = {prod(degrees)}; change a degree or the number of ranks"
            )

    def _degrees(self, names: tuple[str, ...]) -> list[int]:
        return [self.expert_tensor_size if name.startswith("expert_t") else getattr(self, name) for name in names]

    @staticmethod
    def _before_pp(sizes: dict[str, int]) -> str:
        factors = [(axis, size) for axis, size in list(sizes.items())[: list(sizes).index("pp")] if size > 1]
        text = " * ".join(f"{size} ({axis})" for axis, size in factors)
        return f"{text} = {prod(size for _, size in factors)}" if len(factors) > 1 else text or "1"

    @property
    def expert_tensor_size(self) -> int:
        """Number of ranks that split one expert's matrices."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def experts_are_split_as_dense_layers(self) -> bool:
        """True if the expert grid equals the dense grid, as without experts."""
        return self.expert_model_parallel_size == 1 and self.expert_tensor_size == self.tensor_model_parallel_size

    @cached_property
    def dense_sizes(self) -> dict[str, int]:
        """Size of each axis of the dense grid; along the first axis ranks are neighbours."""
        tp, cp, pp = self.tensor_model_parallel_size, self.context_parallel_size, self.pipeline_model_parallel_size
        return self._ordered({"tp": tp, "cp": cp, "ep": 1, "dp": self.world_size // (tp * cp * pp), "pp": pp})

    @cached_property
    def expert_sizes(self) -> dict[str, int]:
        """Size of each axis of the expert grid where it differs from the dense one; the first axis has neighbours."""
        tp, ep, pp = self.expert_tensor_size, self.expert_model_parallel_size, self.pipeline_model_parallel_size
        return self._ordered({"tp": tp, "cp": 1, "ep": ep, "dp": self.world_size // (tp * ep * pp), "pp": pp})

    def _ordered(self, sizes: dict[str, int]) -> dict[str, int]:
        return {axis: sizes[axis] for axis in self.order.split("-")}

    def size(self, name: str) -> int:
        """Return the number of ranks of each group of this name; 1 where the split is not used."""
        return 1 if name == "embd" and self.pipeline_model_parallel_size == 1 else self.groups(name).shape[1]

    def groups(self, name: str) -> Groups:
        """Return the ranks [G, N] of all groups of this name, in ascending order of their first ranks.

        Each rank is in exactly one group, except that stages without embedding are in no "embd" group.

        Raises:
            ValueError: the name is not in ``GROUP_NAMES``.
        """
        dense, expert = _DENSE_AXES | _FURTHER_DENSE_AXES, _EXPERT_AXES | _FURTHER_EXPERT_AXES
        if name in dense:
            return self._dense_groups(dense[name])
        if name in expert:
            return self._expert_groups(expert[name])
        if name in _HYBRID:
            return self._hybrid_groups(_HYBRID[name], inner=name.startswith("intra"))
        if name == "intra_dist_opt":  # all ranks of one replica of the sharded state
            instances, groups = self.num_distributed_optimizer_instances, self.groups("expt_dp")
            return np.sort(rearrange(groups, "g (i r) -> i (g r)", i=instances))
        if name == "embd":
            stages = self._dense_groups(("pp",))
            return stages if stages.shape[1] == 1 else stages[:, list(self.embedding_stages)]
        raise ValueError(f"a group must be one of {', '.join(GROUP_NAMES)}, got {name!r}")

    def ranks(self, name: str, rank: int) -> list[int] | None:
        """Return the ranks of the group of this name that contains ``rank``; None where there is none."""
        groups = self.groups(name)
        found: list[Any] = groups[(groups == rank).any(axis=1)].tolist()
        return found[0] if found else None

    def _dense_groups(self, axes: tuple[str, ...]) -> Groups:
        return _groups_along(self.dense_sizes, axes)

    def _expert_groups(self, axes: tuple[str, ...]) -> Groups:
        if self.experts_are_split_as_dense_layers:
            return self._dense_groups(axes if "dp" not in axes else (*axes, "cp"))
        return _groups_along(self.expert_sizes, axes)

    def _hybrid_groups(self, sharded: str, *, inner: bool) -> Groups:
        """Cut data-parallel groups into inner groups of consecutive ranks, which stay within a host, or into outer ones."""
        groups = self.groups(sharded)
        pattern = "g (i r) -> (g i) r" if inner else "g (i r) -> (g r) i"
        return _by_first_rank(rearrange(groups, pattern, i=self.num_distributed_optimizer_instances))


class RankGenerator:
    """The groups of ranks along axes of one grid, under Megatron-Core's name; ``RankGrid`` has both grids of a run.

    Args:
        order: the axes, neighbouring ranks first, joined by "-"; axes of one rank may be left out.
        rank_offset: the first rank of the grid.

    Raises:
        ValueError: an axis of several ranks is not in ``order``, or both experts and sequences are split.
        NotImplementedError: ``gtp_remat`` is not 1.

    Ranks: pure.
    """

    def __init__(
        self, tp: int, ep: int, dp: int, pp: int, cp: int, order: str, rank_offset: int = 0, gtp_remat: int = 1
    ) -> None:
        if gtp_remat != 1:
            raise NotImplementedError(f"gtp_remat must be 1, got {gtp_remat}: weights are sharded by the engine")
        if ep > 1 and cp > 1:
            raise ValueError(f"one grid must not split experts and sequences, got ep={ep} and cp={cp}; make two grids")
        self.name_to_size = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "cp": cp}
        names = order.lower().split("-")
        if missing := [name for name, size in self.name_to_size.items() if size > 1 and name not in names]:
            raise ValueError(f"order must name the axes of several ranks, got {order!r} without {', '.join(missing)}")
        self.order = "-".join([*names, *(name for name in self.name_to_size if name not in names)])
        self.rank_offset, self.world_size = rank_offset, prod(self.name_to_size.values())

    def get_mask(self, order: str, token: str) -> list[bool]:
        """Return for each axis of ``order`` whether ``token`` names it, both joined by "-"."""
        return [axis in token.split("-") for axis in order.split("-")]

    def get_ranks(self, token: str) -> list[list[int]]:
        """Return the groups [G][N] of ranks that differ on the axes that ``token`` names, joined by "-"."""
        sizes = {axis: self.name_to_size[axis] for axis in self.order.split("-")}
        groups: list[list[int]] = (_groups_along(sizes, tuple(token.split("-"))) + self.rank_offset).tolist()
        return groups


def generate_masked_orthogonal_rank_groups(
    world_size: int, parallel_size: list[int], mask: list[bool]
) -> list[list[int]]:
    """Return the groups [G][N] of ranks that differ on the axes of a grid whose ``mask`` is True.

    Args:
        parallel_size: size of each axis; along the first ranks are neighbours.

    Raises:
        ValueError: the sizes do not multiply to ``world_size``, or there is another number of masks.
    """
    if prod(parallel_size) != world_size or len(mask) != len(parallel_size):
        raise ValueError(
            f"parallel_size must multiply to world_size and have a mask for each axis, got {parallel_size}, {world_size} ranks "
            f"and {mask}"
        )
    sizes = {str(axis): size for axis, size in enumerate(parallel_size)}
    groups: list[list[int]] = _groups_along(
        sizes, tuple(axis for axis, taken in zip(sizes, mask, strict=True) if taken)
    ).tolist()
    return groups


def _groups_along(sizes: dict[str, int], axes: tuple[str, ...]) -> Groups:
    """Return the groups [G, N] of ranks that differ on ``axes`` alone; the first axis of ``sizes`` varies fastest."""
    names = list(sizes)[::-1]  # in an array the last axis varies fastest
    grid = np.arange(prod(sizes.values()), dtype=np.int64).reshape([sizes[name] for name in names])
    kept = [index for index, name in enumerate(names) if name not in axes]
    within = [index for index, name in enumerate(names) if name in axes]
    return _by_first_rank(grid.transpose(kept + within).reshape(-1, prod(sizes[axis] for axis in axes)))


def _by_first_rank(groups: Groups) -> Groups:
    ordered: Groups = groups[np.argsort(groups[:, 0])]
    return ordered

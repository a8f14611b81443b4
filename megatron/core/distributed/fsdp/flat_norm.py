"""The norm of all main gradients, from one pass over flat shards, without a host synchronisation."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from megatron.core.distributed.fsdp.flat_runs import runs_of
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup

_Sharding = tuple[DeviceMesh, tuple[int, ...]]
_GRAD = operator.attrgetter("grad")


def has_gradient(group: FsdpParameterGroup) -> bool:
    """True if a parameter of the group has a gradient; afterwards then the flat main gradient holds those of all.

    What the user put in the place of one is copied there, and a parameter without counts as zero.
    """
    held = list(map(_GRAD, group.sharded))
    if all(map(operator.is_, held, group._grads)):
        return True
    if held.count(None) == len(held):
        return False
    with torch.no_grad():
        group.prepare_main_grad()
    return True


class FlatGradNorm:
    """Takes the norm of the groups' main gradients: each element once, whatever holds it, and no padding.

    Squares are summed in fp32 in two levels of fixed order, so two runs are bitwise equal.
    """

    def __init__(self, groups: Sequence[FsdpParameterGroup]) -> None:
        self._shards = [_GradShard(group) for group in groups]

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        """[] fp32, on the device.

        Ranks: all of the groups' meshes; does not block the host.
        """
        views: dict[_Sharding, dict[torch.dtype, list[torch.Tensor]]] = {}
        device = None
        for shard in self._shards:
            group = shard.group()
            if group is not None:
                device = group.device
                if has_gradient(group):
                    # Also where this rank holds none of it: others wait for its part of the sum.
                    by_dtype = views.setdefault(shard.sharding, {})
                    by_dtype.setdefault(group.main_grad_storage.flat.dtype, []).extend(shard.views(group))
        total = torch.zeros((), dtype=torch.float32, device=device)
        for (mesh, axes), by_dtype in views.items():
            part = _sum_of_squares(list(by_dtype.values()), total)
            for axis in axes:
                dist.all_reduce(part, group=mesh.get_group(axis))
            total = total + part
        return total.sqrt()


class _GradShard:
    """The runs of one group's main gradient, as views that are made once."""

    def __init__(self, group: FsdpParameterGroup) -> None:
        self.group = weakref.ref(group)
        mesh, placements = group.group_mesh.mesh, group.main_weight.placements
        sharded = (axis for axis, placement in enumerate(placements) if isinstance(placement, Shard))
        self.sharding: _Sharding = (mesh, tuple(axis for axis in sharded if mesh.size(axis) > 1))
        self._runs = runs_of(group.main_weight, [0] * len(group.parameters))
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []

    def views(self, group: FsdpParameterGroup) -> list[torch.Tensor]:
        flat = group.main_grad_storage.flat
        if flat is not self._flat:
            self._flat, self._views = flat, [flat[begin:end] for begin, end, _ in self._runs]
        return self._views


def _sum_of_squares(by_dtype: Sequence[list[torch.Tensor]], zero: torch.Tensor) -> torch.Tensor:
    norms = [norm for views in by_dtype if views for norm in torch._foreach_norm(views, 2, dtype=torch.float32)]
    return torch.stack(norms).square().sum() if norms else zero.clone()


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """[] what gradients of this norm [] are multiplied by so that it is at most ``max_norm``; NaN for NaN."""
    return torch.clamp(max_norm / (norm + 1.0e-6), max=1.0)

"""Norms over the whole model: which rank counts which elements, and over which ranks the counts are summed.

The norm of all main gradients takes one pass over flat shards, and does not block the host.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from megatron.core.distributed.fsdp.buffers.grad_sums import sum_grads
from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup, group_of
from megatron.core.distributed.fsdp.flat_optimizer.flat_runs import Run, runs_of

_GRAD = operator.attrgetter("grad")


class NormScope(NamedTuple):
    """The ranks over which sums are taken: some axes of a mesh, or the groups of all ranks of the model."""

    mesh: DeviceMesh | None
    axes: tuple[int, ...]
    groups: tuple[ProcessGroup, ...] = ()

    @property
    def is_model(self) -> bool:
        """True if all ranks of the model take part, also those that count nothing."""
        return bool(self.groups)

    def sum(self, value: torch.Tensor) -> None:
        """Sum ``value`` over the ranks, in place. Ranks: all of the scope."""
        if self.mesh is not None:
            for axis in self.axes:
                dist.all_reduce(value, group=self.mesh.get_group(axis))
        for group in self.groups:
            dist.all_reduce(value, group=group)


# Of what every rank holds in full, and sums over nobody.
EVERYWHERE = NormScope(None, ())


def norm_scope_of(parameter: torch.Tensor) -> NormScope:
    """Over which ranks a norm of this parameter, or of its gradient, is summed. Communicates nothing."""
    group = group_of(parameter)
    if group is not None and group.group_mesh.model.model_groups:
        return NormScope(None, (), group.group_mesh.model.model_groups)
    if not isinstance(parameter, DTensor):
        return EVERYWHERE
    mesh = parameter.device_mesh
    held = enumerate(parameter.placements)
    axes = tuple(axis for axis, placement in held if not isinstance(placement, Replicate) and mesh.size(axis) > 1)
    return NormScope(mesh, axes) if axes else EVERYWHERE


def counts_in_norm(parameter: torch.Tensor) -> bool:
    """Return whether this rank counts its elements of the parameter: each element is counted once in its scope.

    Where sums go over all ranks of the model, of those that hold the same elements the first one counts them, and nobody
    counts a copy that a pipeline stage holds of another's parameter. Else replicas are not summed over at all.
    """
    if not norm_scope_of(parameter).is_model:
        return True
    if is_copy(parameter):
        return False
    assert isinstance(parameter, DTensor), "parameters of the engine's groups are DTensors"
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    placed = zip(parameter.placements, coordinate, strict=True)
    return all(at == 0 for placement, at in placed if isinstance(placement, Replicate))


def is_copy(parameter: torch.Tensor) -> bool:
    """Return whether this is a stage's copy of another stage's parameter, whose name is the copy's ``canonical_name``."""
    return getattr(parameter, "canonical_name", None) is not None


def has_gradient(group: FsdpParameterGroup) -> bool:
    """Return whether a parameter of the group has a gradient; if so, complete the flat main gradient.

    A gradient that the user has put in place of the engine's is copied into it; zeros are where a parameter has none.
    """
    held = list(map(_GRAD, group.sharded))
    if all(map(operator.is_, held, group.grads.main.tensors)):
        return True
    if held.count(None) == len(held):
        return False
    with torch.no_grad():
        group.grads.complete_main()
    return True


class FlatGradNorm:
    """The norm of the groups' main gradients, each element counted once and no padding.

    Squares are summed in fp32 in a fixed order, so two runs are bitwise equal.
    """

    def __init__(self, groups: Sequence[FsdpParameterGroup]) -> None:
        self._shards = [_GradShard(group) for group in groups]

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        """Return the norm as [] fp32 on the device.

        Ranks: all of the groups' meshes, and of the model where it is split; does not block the host.
        """
        living = [(shard, group) for shard in self._shards if (group := shard.group()) is not None]
        sum_grads([group for _, group in living], in_use=True)
        views: dict[NormScope, dict[torch.dtype, list[torch.Tensor]]] = {}
        for shard, group in living:
            has_any = has_gradient(group)
            for scope, counted in shard.views(group):
                # A scope of the whole model also without gradients: the other ranks wait for this one's sum.
                if has_any or scope.is_model:
                    by_dtype = views.setdefault(scope, {})
                    if has_any:
                        by_dtype.setdefault(group.grads.main.storage.flat.dtype, []).extend(counted)
        total = torch.zeros((), dtype=torch.float32, device=living[-1][1].device if living else None)
        for scope, by_dtype in views.items():
            part = _sum_of_squares(list(by_dtype.values()), total)
            scope.sum(part)
            total = total + part
        return total.sqrt()


class _GradShard:
    """Views of the runs of a group's main gradient that this rank counts."""

    def __init__(self, group: FsdpParameterGroup) -> None:
        self.group = weakref.ref(group)
        scopes = [norm_scope_of(parameter) for parameter in group.sharded]
        self._runs: dict[NormScope, list[Run]] = {}
        for scope in dict.fromkeys(scopes):
            counted = [own == scope and counts_in_norm(p) for own, p in zip(scopes, group.sharded, strict=True)]
            self._runs[scope] = runs_of(group.weights.main, [0] * len(counted), only=counted)
        self._flat: torch.Tensor | None = None
        self._views: list[tuple[NormScope, list[torch.Tensor]]] = []

    def views(self, group: FsdpParameterGroup) -> list[tuple[NormScope, list[torch.Tensor]]]:
        """Return the views by the ranks over which they are summed; undefined content without gradients."""
        flat = group.grads.main.storage.flat
        if flat is not self._flat:
            self._flat = flat
            self._views = [(scope, [flat[begin:end] for begin, end, *_ in runs]) for scope, runs in self._runs.items()]
            group.grads.main.note_views(sum(map(len, self._runs.values())))
        return self._views


def _sum_of_squares(by_dtype: Sequence[list[torch.Tensor]], zero: torch.Tensor) -> torch.Tensor:
    norms = [norm for views in by_dtype if views for norm in torch._foreach_norm(views, 2, dtype=torch.float32)]
    return torch.stack(norms).square().sum() if norms else zero.clone()

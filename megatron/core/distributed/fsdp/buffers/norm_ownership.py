"""Norms over the whole model: which rank counts which elements, and over which ranks the counts are summed."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from megatron.core.distributed.fsdp.buffers.parameter_group import group_of


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

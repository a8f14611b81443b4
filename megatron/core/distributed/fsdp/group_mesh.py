"""The ranks over which a group of parameters is sharded, and what moves its bytes between them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from megatron.core.distributed.fsdp.collectives import MemoryKind, Transport
from megatron.core.distributed.fsdp.model_parallel import ModelParallel
from megatron.core.distributed.fsdp.placement import Placements


@dataclass(frozen=True)
class GroupMesh:
    """The data-parallel axes of a group, outermost first, and a transport for each.

    Buffers lie in memory of the innermost axis's transport, which moves whole ones; outer axes move parts of them.

    Args:
        rows_mesh: the same axes, innermost first: what DTensors name, where an axis cuts what those before it leave.
            [Note: cuts go inside out] in DESIGN.md.
        tensor_mesh: the tensor-parallel axis, and behind it those of ``rows_mesh``: what DTensors name where there is one.
        model: between which ranks the model is split besides.
    """

    mesh: DeviceMesh
    axes: tuple[Transport, ...]
    rows_mesh: DeviceMesh
    tensor_mesh: DeviceMesh | None = None
    model: ModelParallel = field(default_factory=ModelParallel)

    @property
    def size(self) -> int:
        """Data-parallel ranks."""
        return self.mesh.size()

    @property
    def tensor_size(self) -> int | None:
        """Tensor-parallel ranks; None where there is no such axis."""
        return None if self.tensor_mesh is None else self.tensor_mesh.size(0)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device, kind: MemoryKind) -> torch.Tensor:
        """Memory [numel] for buffers of ``kind``, of the innermost axis's transport. Ranks: all of that, alike."""
        return self.axes[-1].empty(numel, dtype, device, kind)

    def num_shards(self, placements: Placements) -> int:
        """Ranks that share a buffer: of the axes over which anything is sharded."""
        kinds = zip(placements.parameter, placements.gradient, placements.optimizer, strict=True)
        sharded = [any(isinstance(p, Shard) for p in of_axis) for of_axis in kinds]
        return math.prod(axis.size for axis, is_sharded in zip(self.axes, sharded, strict=True) if is_sharded)

    def grad_scale(self, placements: Placements, grad_divisor: float | Fraction) -> float:
        """What sums of gradients are multiplied by: averaged where placements say so, and divided by ``grad_divisor``."""
        divisor = Fraction(grad_divisor)
        for placement, axis in zip(placements.gradient, self.axes, strict=True):
            if isinstance(placement, Shard) or placement.reduce_op == "avg":  # type: ignore[attr-defined]
                divisor *= axis.size
        return float(1 / divisor)

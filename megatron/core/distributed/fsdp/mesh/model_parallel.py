"""How a model is split besides data parallelism: what its parameters, gradients and norms need to know of it.

See [Note: parts of a model].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from megatron.core.distributed.fsdp.dtensor.placements import BlockShard
from megatron.core.distributed.fsdp.mesh.placed_parameter import PlacedParameter


@dataclass(frozen=True, kw_only=True)
class ModelParallel:
    """The ranks over which a model is split besides data parallelism.

    Attributes of a parameter, with Megatron's names, say how it is split: ``tensor_model_parallel``, ``partition_dim``
    and ``partition_stride`` (this rank's parameter is its part of a larger tensor), ``sequence_parallel`` (it is the same
    on all tensor-parallel ranks, each of which sees a part of the sequence), ``allreduce=False`` (an expert's),
    ``shared_embedding`` (another pipeline stage holds it too), ``canonical_name`` (it is a copy of the parameter of that
    name, which another pipeline stage holds).

    Args:
        tensor_axis: name of the axis of the mesh (and of ``expert_mesh``, if it has one so named) over which
            tensor-parallel parameters are split. Their DTensors are those of the whole tensors, over this axis and
            the data-parallel ones. Gradients of ``sequence_parallel`` parameters are summed over it, once per step.
        expert_mesh: mesh over which parameters with ``allreduce=False`` are sharded, with the same names of axes as the
            other. Experts get tokens from all ranks of the other mesh, so their gradients are divided by its size.
        expert_group_ag: a process group of the ranks of ``expert_mesh`` for all-gathers alone.
        embedding_group: process group of the ranks that hold ``shared_embedding`` parameters; their gradients are summed
            over it, once per step, before they are used.
        model_groups: process groups that together span all ranks that hold a part of the model: one of all, or several,
            over which sums are taken one after the other. Norms are such sums; each rank adds the elements that it owns,
            and each element is owned once. Empty: the meshes of the parameters span the model.
    """

    tensor_axis: str | None = None
    expert_mesh: DeviceMesh | None = None
    expert_group_ag: ProcessGroup | None = None
    embedding_group: ProcessGroup | None = None
    model_groups: tuple[ProcessGroup, ...] = ()


@dataclass(frozen=True)
class TensorPart:
    """The whole tensor that this rank's parameter is a tensor-parallel part of.

    Args:
        shape: of the whole tensor.
        placements: [1] on the tensor-parallel axis ([2] where it has two); [] where there is none.
    """

    shape: torch.Size
    placements: tuple[Placement, ...] = ()

    @property
    def is_replicated(self) -> bool:
        """True if all tensor-parallel ranks hold the same tensor."""
        return all(isinstance(placement, Replicate) for placement in self.placements)


def part_of(
    parameter: torch.Tensor, name: str, num_ranks: int | None, placed: PlacedParameter | None = None
) -> TensorPart:
    """Read from a parameter's attributes which whole tensor it is a part of.

    Args:
        placed: says so instead, where the parameter was a DTensor.
        num_ranks: tensor-parallel ranks; None where there is no such axis.

    Raises:
        ValueError: ``partition_dim`` is no dim of the parameter, or ``partition_stride`` does not divide it.
        NotImplementedError: blocks along another dim than 0.
    """
    if placed is not None:
        return TensorPart(placed.shape, placed.placements)
    if num_ranks is None:
        return TensorPart(parameter.shape)
    if not getattr(parameter, "tensor_model_parallel", False):
        return TensorPart(parameter.shape, (Replicate(),))
    dim, stride = getattr(parameter, "partition_dim", 0), getattr(parameter, "partition_stride", 1)
    if not 0 <= dim < parameter.dim():
        raise ValueError(
            f"partition_dim of parameter {name} must be one of its {parameter.dim()} dims, got {dim}; set it with "
            "tensor_model_parallel=True"
        )
    if stride < 1 or parameter.shape[dim] % stride != 0:
        raise ValueError(
            f"partition_stride of parameter {name} must divide its {parameter.shape[dim]} entries of dim {dim}, got {stride}"
        )
    if stride > 1 and dim != 0:
        raise NotImplementedError(
            f"parameter {name} must hold its {stride} matrices along dim 0, got partition_dim={dim}; transpose it, or "
            "make each matrix a parameter"
        )
    shape = [extent * num_ranks if at == dim else extent for at, extent in enumerate(parameter.shape)]
    return TensorPart(torch.Size(shape), (BlockShard(stride) if stride > 1 else Shard(dim),))


def is_shared_between_stages(parameter: torch.Tensor, model: ModelParallel) -> bool:
    """Return whether another pipeline stage holds the parameter too; gradients are then summed over both stages."""
    group = model.embedding_group
    return group is not None and group.size() > 1 and getattr(parameter, "shared_embedding", False)

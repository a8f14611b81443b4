"""How a model is split in addition to data parallelism: what its parameters, gradients and norms need to know of it.

See [Note: parts of a model].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from megatron.core.distributed.fsdp.dtensor.placements import BlockShard

# Attribute of the mesh of a sharded parameter that was a DTensor before: its data-parallel part, over which the model's other parameters lie.
DATA_PART = "_fsdp_data_part"


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


@dataclass(frozen=True, kw_only=True)
class PlacedParameter(TensorPart):
    """How a parameter that is a DTensor is split before it is sharded, as ``parallelize_module`` of PyTorch leaves it.

    The engine works on the local tensors. At rest modules hold DTensors over the tensor-parallel axes and the data-parallel ones;
    in use, DTensors over the tensor-parallel axes, around views of what was gathered.

    Args:
        mesh: tensor-parallel ranks; ``placements`` has one for each of its axes.
    """

    mesh: DeviceMesh

    def over(self, local: torch.Tensor) -> DTensor:
        """Return the DTensor whose part on this rank is ``local``, over the tensor-parallel ranks."""
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=stride)


def taken_apart(parameter: nn.Parameter, name: str, device_type: str) -> tuple[nn.Parameter, PlacedParameter]:
    """Return a plain parameter over the local tensor of one that is a DTensor, and how that is split.

    Args:
        name: of the parameter, for errors.
        device_type: of the data-parallel mesh.

    Raises:
        ValueError: its mesh is of another device type.
        NotImplementedError: it is neither split evenly along a dim nor replicated, or its local tensor is none of torch's own.
    """
    assert isinstance(parameter, DTensor), "other parameters are whole"
    mesh, local = parameter.device_mesh, parameter._local_tensor
    if mesh.device_type != device_type:
        raise ValueError(
            f"the mesh of parameter {name}, which is a DTensor, must be of the same device type as the data-parallel mesh, "
            f"{device_type}, got {mesh.device_type}; make both of one mesh: init_device_mesh(type, sizes, mesh_dim_names=...)"
        )
    if any(type(placement) not in (Shard, Replicate) for placement in parameter.placements):
        raise NotImplementedError(
            f"parameter {name}, which is a DTensor, must be placed by Shard and Replicate, got {parameter.placements}; "
            "redistribute it before fully_shard"
        )
    if type(local) not in (torch.Tensor, nn.Parameter):
        raise NotImplementedError(
            f"parameter {name}, which is a DTensor, must hold a plain tensor, got a {type(local).__name__}; weights with "
            "fsdp_pre_all_gather are served where they are not split by tensor parallelism"
        )
    # A new parameter with the same attributes: codecs, granules and Megatron's marks are found on it.
    plain = nn.Parameter(local.detach(), requires_grad=parameter.requires_grad)
    plain.__dict__.update(parameter.__dict__)
    return plain, PlacedParameter(parameter.shape, tuple(parameter.placements), mesh=mesh)


@torch.no_grad()
def local_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's part of the gradient of a DTensor, placed as the parameter is; None if there is none.

    Ranks: those of the tensor-parallel axes, where it is not placed so yet, as sums over them that are left to do.
    """
    grad = parameter.grad
    if grad is None:
        return None
    assert isinstance(parameter, DTensor) and isinstance(grad, DTensor), "gradients are placed like parameters"
    # A collective: placements are the same on all tensor-parallel ranks, so these enter it together.
    if grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    return grad.to_local()


@dataclass(frozen=True, kw_only=True)
class ModelParallel:
    """The ranks over which a model is split in addition to data parallelism.

    Attributes of a parameter, with Megatron's names, describe how it is split: ``tensor_model_parallel``, ``partition_dim``
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
        expert_group_ag: a process group of the ranks of ``expert_mesh`` for all-gathers only.
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


def part_of(
    parameter: torch.Tensor, name: str, num_ranks: int | None, placed: PlacedParameter | None = None
) -> TensorPart:
    """Read from a parameter's attributes which whole tensor it is a part of.

    Args:
        placed: the result, where the parameter was a DTensor.
        num_ranks: tensor-parallel ranks; None where there is no such axis.

    Raises:
        ValueError: ``partition_dim`` is no dim of the parameter, or ``partition_stride`` does not divide it.
        NotImplementedError: blocks along another dim than 0.
    """
    if placed is not None:
        return placed
    if num_ranks is None:
        return TensorPart(parameter.shape)
    # Megatron's layers set partition_dim also on parameters that are not split, so this attribute decides.
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

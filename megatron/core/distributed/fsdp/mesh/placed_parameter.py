"""Parameters that are DTensors over tensor-parallel ranks when they are sharded, as ``parallelize_module`` of PyTorch leaves them.

The engine works on the local tensors. At rest modules hold DTensors over the tensor-parallel axes and the data-parallel ones; in
use, DTensors over the tensor-parallel axes, around views of what was gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

# Attribute of the mesh of such a sharded parameter: its data-parallel part, over which the model's other parameters lie.
DATA_PART = "_fsdp_data_part"


@dataclass(frozen=True)
class PlacedParameter:
    """How a parameter that is a DTensor is split before it is sharded.

    Args:
        mesh: tensor-parallel ranks.
        placements: one for each axis of ``mesh``.
        shape: of the whole tensor.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size

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
    plain = nn.Parameter(local.detach(), requires_grad=parameter.requires_grad)
    plain.__dict__.update(parameter.__dict__)
    return plain, PlacedParameter(mesh, tuple(parameter.placements), parameter.shape)


@torch.no_grad()
def local_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's part of the gradient of a DTensor, placed as the parameter is; None if there is none.

    Ranks: those of the tensor-parallel axes, where it is not placed so yet, as sums over them that are left to do.
    """
    grad = parameter.grad
    if grad is None:
        return None
    assert isinstance(parameter, DTensor) and isinstance(grad, DTensor), "gradients are placed like parameters"
    if grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    return grad.to_local()

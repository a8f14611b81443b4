"""DTensors whose local tensors are views of flat buffers.

[Note: offsets] A DTensor takes over the storage offset of the local tensor that it is made of. Where that is not 0, torch.save and
deepcopy look for data in the DTensor itself, which has none ("invalid python storage"). So what users save or copy is made of a
view that begins at the buffer's start, and gets its local tensor after that.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.dtensor.uneven_dtensor import UnevenDTensor


def placed_like(parameter: DTensor, local: torch.Tensor) -> UnevenDTensor:
    """Make a DTensor of the parameter's shape and placements, with ``local`` as this rank's part; it can be saved and copied.

    Ranks: each on its own. Autograd does not connect the two.
    """
    local = local.detach()
    shell = local.as_strided(local.shape, local.stride(), 0)
    if local.device.type != parameter.device_mesh.device_type:
        shell = torch.empty_strided(
            local.shape, local.stride(), dtype=local.dtype, device="meta"
        )  # as it is on the mesh's kind of devices
    placed = UnevenDTensor.over(
        shell, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )
    placed._local_tensor = local
    return placed

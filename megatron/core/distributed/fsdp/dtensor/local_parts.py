"""DTensors around parts of flat buffers.

[Note: offsets] A DTensor takes over its local tensor's storage offset, and where that is not 0, torch.save and deepcopy look for data
in the DTensor itself, which has none ("invalid python storage"). What users save or copy is therefore made around a view that
begins at the buffer's start, and given its local tensor afterwards.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def placed_like(parameter: DTensor, local: torch.Tensor) -> DTensor:
    """The DTensor of the parameter's shape and placements whose part on this rank is ``local``; can be saved and copied.

    Ranks: each alone. Autograd does not know what the two have in common.
    """
    local = local.detach()
    placed = DTensor.from_local(
        local.as_strided(local.shape, local.stride(), 0),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    placed._local_tensor = local
    return placed

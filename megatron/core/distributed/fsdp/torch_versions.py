"""What differs between the versions of torch that we run on (2.11 and newer), and nowhere else."""

from __future__ import annotations

import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

# 2.13 renames the flat collectives and warns about the old names, which are the only ones in 2.11.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_functional = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor

"""What differs between the versions of torch that we run on (2.11 and newer), and nowhere else."""

from __future__ import annotations

# The first DTensor would import this, and torch.fx.wrap, which runs during the import, leaves a cycle that holds the
# frames of everybody who is being called: the first model would stay until the collector comes. Delete this line when
# torch.fx.wrap no longer keeps its frame, or DTensor no longer imports dynamo.
import torch._dynamo  # noqa: F401
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

# 2.13 renames the flat collectives and warns about the old names, which are the only ones in 2.11.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_functional = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor

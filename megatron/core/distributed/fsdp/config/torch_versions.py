"""What differs between the versions of torch that we run on (2.11 and newer), and nowhere else."""

from __future__ import annotations

# The first DTensor would import this, and torch.fx.wrap, which runs during the import, leaves a cycle that holds the
# frames of everybody who is being called: the first model would stay until the collector comes. Delete this line when
# torch.fx.wrap no longer keeps its frame, or DTensor no longer imports dynamo.
import torch
import torch._dynamo
import torch.distributed._functional_collectives as funcol
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch.distributed import ProcessGroup, ReduceOp

# 2.13 renames the flat collectives and warns about the old names, which are the only ones in 2.11.
all_gather_functional = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
_gather = getattr(ProcessGroup, "all_gather_single", None) or ProcessGroup._allgather_base
_reduce_scatter = getattr(ProcessGroup, "reduce_scatter_single", None) or ProcessGroup._reduce_scatter_base


def _gather_options() -> AllgatherOptions:
    options = AllgatherOptions()
    options.asyncOp = False
    return options


def _sum_options() -> ReduceScatterOptions:
    options = ReduceScatterOptions()
    options.asyncOp = False
    options.reduceOp = ReduceOp.SUM  # type: ignore[assignment]
    return options


_GATHER, _SUM = _gather_options(), _sum_options()


def all_gather_flat(group: ProcessGroup, full: torch.Tensor, shard: torch.Tensor) -> None:
    """``full`` holds the ranks' ``shard`` in rank order, on the current stream. Ranks: all of the group.

    The group's own method: the functions of torch.distributed take several times its time on the host.
    """
    work = _gather(group, full, shard, _GATHER)
    if work is not None:  # a backend that does not order its work by itself
        work.wait()


def reduce_scatter_flat(group: ProcessGroup, shard: torch.Tensor, full: torch.Tensor) -> None:
    """``shard`` holds this rank's segment of the sum of all ranks' ``full``, on the current stream. Ranks: all."""
    work = _reduce_scatter(group, shard, full, _SUM)
    if work is not None:
        work.wait()

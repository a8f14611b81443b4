"""Which transport serves a group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.distributed.fsdp.collectives.process_group import ProcessGroupTransport, RankOrderTransport
from megatron.core.distributed.fsdp.collectives.transport import LocalTransport, Transport


def make_transport(group: ProcessGroup, gather_group: ProcessGroup, device: torch.device) -> Transport:
    """The transport for buffers on ``device`` between the ranks of ``group``.

    Raises:
        ValueError: the group's backend does not serve the device.
    """
    if group.size() == 1:
        return LocalTransport(dist.get_process_group_ranks(group))
    if device.type == "cuda":
        backend = str(dist.get_backend_config(group))  # such as "cpu:gloo,cuda:nccl"
        if "nccl" not in backend:
            raise ValueError(
                f"a group for CUDA tensors must have the nccl backend, got {backend!r}; pass a mesh on 'cuda'"
            )
        return ProcessGroupTransport(group, gather_group)
    return RankOrderTransport(group, gather_group)

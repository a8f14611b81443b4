"""The table of transports. A new transport is a file in this folder, a row here, and its name in ``TransportKind``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed import ProcessGroup

from megatron.core.distributed.fsdp.comm.peer.peer_copy import PeerCopyTransport, peer_copy_problem
from megatron.core.distributed.fsdp.comm.process_group import make_process_group_transport
from megatron.core.distributed.fsdp.comm.symmetric import SymmetricTransport, symmetric_memory_problem
from megatron.core.distributed.fsdp.comm.transport import Transport


@dataclass(frozen=True)
class TransportRow:
    """One kind of transport."""

    summary: str
    """How it moves bytes, for the help of flags."""

    make: Callable[[ProcessGroup, ProcessGroup, torch.device], Transport]
    """Makes one from a process group, the process group for all-gathers, and the device of the buffers."""

    problem: Callable[[ProcessGroup, torch.device], str | None] | None = None
    """Says why it cannot serve a process group's buffers on a device, the same on all ranks; None if it can. All ranks
    call it and then make the transport together, once for a mesh. A row without it serves every process group; each
    rank makes that transport alone, one for each unit."""


# "auto" takes an earlier row where a later one is hardly faster.
TRANSPORTS: dict[str, TransportRow] = {
    "nccl": TransportRow("the process group, on CPUs gloo", make_process_group_transport),
    "symm": TransportRow("NCCL symmetric memory", SymmetricTransport, symmetric_memory_problem),
    "peer_copy": TransportRow("copies between the ranks' memory", PeerCopyTransport, peer_copy_problem),
}
# Type checkers cannot read the table.
TransportKind = Literal["auto", "nccl", "symm", "peer_copy"]
# {what users may ask for: how it moves bytes}
TRANSPORT_KINDS: dict[str, str] = {
    "auto": "measures those that can serve the ranks",
    **{kind: row.summary for kind, row in TRANSPORTS.items()},
}


def transport_problem(kind: str, group: ProcessGroup, device: torch.device) -> str | None:
    """Say why a kind cannot serve the process group, the same on all ranks; None if it can. Ranks: all; may block."""
    problem = TRANSPORTS[kind].problem
    return None if problem is None else problem(group, device)

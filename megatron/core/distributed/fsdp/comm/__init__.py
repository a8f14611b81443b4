"""The code that moves bytes between ranks: one interface, a file for each transport, and their table (registry.py)."""

from megatron.core.distributed.fsdp.comm.choose import SharedTransports, make_transport
from megatron.core.distributed.fsdp.comm.process_group import ProcessGroupTransport, RankOrderTransport
from megatron.core.distributed.fsdp.comm.registry import TRANSPORT_KINDS, TransportKind
from megatron.core.distributed.fsdp.comm.transport import LocalTransport, MemoryKind, Transport, unfinished

__all__ = [
    "TRANSPORT_KINDS",
    "LocalTransport",
    "MemoryKind",
    "ProcessGroupTransport",
    "RankOrderTransport",
    "SharedTransports",
    "Transport",
    "TransportKind",
    "make_transport",
    "unfinished",
]

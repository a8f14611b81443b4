"""The table of transports, and the one for a process group.

A new transport is a file in this folder, a row here, and its name in ``TransportKind``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.fsdp.comm.peer_copy import PeerCopyTransport, peer_copy_problem
from megatron.core.distributed.fsdp.comm.process_group import compare_on_ranks, make_process_group_transport
from megatron.core.distributed.fsdp.comm.symmetric import SymmetricTransport, symmetric_memory_problem
from megatron.core.distributed.fsdp.comm.transport import LocalTransport, Transport


@dataclass(frozen=True)
class TransportRow:
    """One kind of transport."""

    summary: str
    """How it moves bytes, for the help of flags."""

    make: Callable[[ProcessGroup, ProcessGroup, torch.device], Transport]
    """Makes one from a process group, the process group for all-gathers, and the device of the buffers."""

    problem: Callable[[ProcessGroup, torch.device], str | None] | None = None
    """Returns why it cannot serve a process group's buffers on a device, the same on all ranks; None if it can. All ranks
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
# Chooses a kind for a process group, the process group for its all-gathers, and the device. Ranks: all; the same on all.
Fastest = Callable[[ProcessGroup, ProcessGroup, torch.device], str]
# {what users may ask for: how it moves bytes}
TRANSPORT_KINDS: dict[str, str] = {
    "auto": "measures those that can serve the ranks",
    **{kind: row.summary for kind, row in TRANSPORTS.items()},
}


def transport_problem(kind: str, group: ProcessGroup, device: torch.device) -> str | None:
    """Return why a kind cannot serve the process group, the same on all ranks; None if it can. Ranks: all; may block."""
    problem = TRANSPORTS[kind].problem
    return None if problem is None else problem(group, device)


def make_transport(
    group: ProcessGroup, gather_group: ProcessGroup, device: torch.device, kind: str = "nccl"
) -> Transport:
    """Make a transport of a kind for buffers on ``device``; for one rank alone a ``LocalTransport``, whatever the kind.

    Args:
        group: the ranks of the transport.
        gather_group: a process group of the same ranks for all-gathers; ``group`` itself where there is none.
        kind: a key of ``TRANSPORT_KINDS``.

    Raises:
        ValueError: an unknown kind, the backend of ``group`` does not serve the device, or the kind cannot serve the
        ranks.

    Ranks: all of ``group``, with the same arguments; may block.
    """
    kind = resolve_kind(kind, group, gather_group, device)
    if group.size() == 1:
        return LocalTransport(dist.get_process_group_ranks(group))
    if (problem := transport_problem(kind, group, device)) is not None:
        raise ValueError(
            f"transport={kind!r} cannot serve ranks {dist.get_process_group_ranks(group)} on {device.type}: {problem}; "
            "use transport='nccl' (the process group), or 'auto', which takes what can"
        )
    return TRANSPORTS[kind].make(group, gather_group, device)


def resolve_kind(
    kind: str, group: ProcessGroup, gather_group: ProcessGroup, device: torch.device, fastest: Fastest | None = None
) -> str:
    """Return the kind, with "auto" replaced by the fastest one.

    Args:
        fastest: finds it; None: it is the first row, which serves every process group.

    Raises:
        ValueError: an unknown kind, or the backend of ``group`` does not serve the device.

    Ranks: all of ``group``; all get the same answer. May block.
    """
    if kind not in TRANSPORT_KINDS:
        raise ValueError(f"transport must be one of {', '.join(TRANSPORT_KINDS)}, got {kind!r}")
    if group.size() == 1:
        return "nccl" if kind == "auto" else kind
    backend = str(dist.get_backend_config(group))  # such as "cpu:gloo,cuda:nccl"
    if device.type == "cuda" and "nccl" not in backend:
        raise ValueError(f"a group for CUDA tensors must have the nccl backend, got {backend!r}; pass a mesh on 'cuda'")
    if kind != "auto":
        return kind
    # On CPUs there is nothing to choose: copies are made by the cores that compute, whoever asks for them.
    return fastest(group, gather_group, device) if fastest is not None and device.type == "cuda" else "nccl"


class SharedTransports:
    """The transports over the process groups of one mesh: units over the mesh share those that all ranks make together.

    They live as long as the mesh, so that whether one is made does not depend on when a rank deletes a model. They hold
    no memory. What "auto" has chosen for a process group stays chosen.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Transport] = {}
        self._resolved: dict[tuple[Any, ...], str] = {}
        # PyTorch caches meshes until the interpreter ends. Process groups torn down that late abort it, since they have
        # threads of their own; a finalizer, which also runs at exit, releases them first.
        weakref.finalize(self, self._made.clear)

    @classmethod
    def of(cls, mesh: DeviceMesh) -> SharedTransports:
        """Return those of a mesh, which carries them as an attribute."""
        shared: SharedTransports = mesh.__dict__.setdefault("_fsdp_transports", cls())
        return shared

    def get(
        self,
        kind: str,
        group: ProcessGroup,
        gather_group: ProcessGroup,
        device: torch.device,
        fastest: Fastest | None = None,
    ) -> Transport:
        """Return the transport of a kind: a shared one where all ranks make it together, else a new one.

        Args:
            fastest: as for ``resolve_kind``, which is asked once for each kind and pair of process groups.

        Raises:
            ValueError: what ``make_transport`` raises; ranks that ask for different transports, which would wait for each
                other in different collectives.

        Ranks: all of ``group``; may block.
        """
        # Names, since process groups as keys would live as long as the mesh.
        names = (kind, group.group_name, gather_group.group_name, device)
        if names not in self._resolved:
            settings = {
                "transport": kind,
                "whether there is a process group for all-gathers alone (fsdp_group_ag)": gather_group is not group,
                "torch.use_deterministic_algorithms with transport='auto'": kind == "auto"
                and torch.are_deterministic_algorithms_enabled(),
            }
            compare_on_ranks(settings, [group], device)
            self._resolved[names] = resolve_kind(kind, group, gather_group, device, fastest)
        kind = self._resolved[names]
        key = (kind, group, gather_group, device)
        transport = self._made.get(key) or make_transport(group, gather_group, device, kind)
        # Not those that each rank makes alone: they would keep their process groups for longer than their units.
        if TRANSPORTS[kind].problem is not None:
            self._made[key] = transport
        return transport

    def __reduce__(self) -> tuple[type[SharedTransports], tuple[()]]:
        return SharedTransports, ()  # a copied or pickled mesh has none: transports belong to a process


# DTensors carry their mesh into files of torch.save, and the mesh its transports, without content.
torch.serialization.add_safe_globals([SharedTransports])

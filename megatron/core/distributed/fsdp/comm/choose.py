"""Which transport serves a group: the one that was asked for, or a word on why it cannot."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.fsdp.comm.auto import cheapest, describe, measure
from megatron.core.distributed.fsdp.comm.process_group import make_process_group_transport
from megatron.core.distributed.fsdp.comm.symmetric import SymmetricTransport, symmetric_memory_problem
from megatron.core.distributed.fsdp.comm.transport import LocalTransport, Transport

TransportKind = Literal["auto", "nccl", "symm", "peer_copy"]
TRANSPORT_KINDS: tuple[str, ...] = get_args(TransportKind)

# What is not everywhere, in the order in which "auto" prefers an earlier one that is as good.
_DIRECT_KINDS = ("symm", "peer_copy")


def make_transport(
    group: ProcessGroup, gather_group: ProcessGroup, device: torch.device, kind: str = "nccl"
) -> Transport:
    """The transport of a kind for buffers on ``device`` between the ranks of ``group``.

    Args:
        gather_group: a group of the same ranks for all-gathers; ``group`` itself where there is none.
        kind: "nccl" is the process group whatever its backend (on gloo, sums in rank order), "symm" NCCL's symmetric
            memory, "peer_copy" copies between the ranks' memory, "auto" the fastest of those that can serve the group.

    Raises:
        ValueError: an unknown kind, the group's backend does not serve the device, or the kind cannot serve the group.

    Ranks: all of the group, with the same arguments; may block. A group of one rank needs no transport and gets a
    local one, whatever the kind.
    """
    kind = resolve_kind(kind, group, gather_group, device)
    if group.size() == 1:
        return LocalTransport(dist.get_process_group_ranks(group))
    if kind in _DIRECT_KINDS and (problem := transport_problem(kind, group, device)) is not None:
        raise ValueError(
            f"transport={kind!r} cannot serve ranks {dist.get_process_group_ranks(group)} on {device.type}: {problem}; "
            "use transport='nccl' (the process group), or 'auto', which takes what can"
        )
    return _construct(kind, group, gather_group, device)


def resolve_kind(
    kind: str,
    group: ProcessGroup,
    gather_group: ProcessGroup,
    device: torch.device,
    *,
    sizes_nbytes: Sequence[int] = (),
) -> str:
    """The kind, with "auto" replaced by what serves the group fastest, which rank 0 of the run then prints.

    Args:
        sizes_nbytes: bytes of the buffers to be gathered and reduced, as far as they are known; none: a guess.

    Raises:
        ValueError: an unknown kind, or a group whose backend does not serve the device.

    Ranks: all of the group; all choose alike. "auto" blocks for its measurements where there is a choice.
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
    return _fastest(group, gather_group, device, sizes_nbytes) if device.type == "cuda" else "nccl"


def _fastest(group: ProcessGroup, gather_group: ProcessGroup, device: torch.device, sizes_nbytes: Sequence[int]) -> str:
    problems = {kind: transport_problem(kind, group, device) for kind in _DIRECT_KINDS}
    kinds = ["nccl", *(kind for kind, problem in problems.items() if problem is None)]
    why = [f"{kind} cannot serve: {problem}" for kind, problem in problems.items() if problem is not None]
    if len(kinds) == 1:
        chosen = "nccl"
    elif torch.are_deterministic_algorithms_enabled():
        # A stopwatch might choose another one on the next start, whose sums have another order.
        chosen = kinds[-1]
        why.insert(0, "not measured, since deterministic algorithms are asked for")
    else:
        # Training needs both communicators anyway; a first collective makes one, which takes longer than to measure it.
        dist.all_reduce(torch.zeros(1, device=device), group=gather_group)
        makers = {kind: functools.partial(_construct, kind, group, gather_group, device) for kind in kinds}
        figures, failed, sizes, seconds = measure(makers, group, device, sizes_nbytes)
        chosen = cheapest(figures)
        why = [describe(figures, sizes), f"measured in {seconds:.1f} s", *why]
        why += [f"{kind} failed: {error}" for kind, error in failed.items()]
    if dist.get_rank() == 0:
        print(f"fsdp transport: {chosen} between {group.size()} ranks; {'; '.join(why)}", flush=True)
    return chosen


def transport_problem(kind: str, group: ProcessGroup, device: torch.device) -> str | None:
    """Why the kind cannot serve the group, the same on all its ranks; None where it can. Ranks: all; may block."""
    if kind == "symm":
        return symmetric_memory_problem(group, device)
    if kind == "peer_copy":
        from megatron.core.distributed.fsdp.comm.peer.peer_copy import peer_copy_problem

        return peer_copy_problem(group, device)
    return None


def _construct(kind: str, group: ProcessGroup, gather_group: ProcessGroup, device: torch.device) -> Transport:
    if kind == "symm":
        return SymmetricTransport(group, gather_group, device)
    if kind == "peer_copy":
        from megatron.core.distributed.fsdp.comm.peer.peer_copy import PeerCopyTransport

        return PeerCopyTransport(group, gather_group, device)
    return make_process_group_transport(group, gather_group, device)


def _forget(*tables: dict[tuple[Any, ...], Any]) -> None:
    for table in tables:
        table.clear()


class SharedTransports:
    """The transports over the groups of one mesh: units that are sharded over it share those that take all ranks to make.

    These live as long as the mesh, so that whether one is made does not depend on when a rank lets go of a model. They
    hold no memory. What "auto" has chosen for a group stays chosen.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Transport] = {}
        self._chosen: dict[tuple[Any, ...], str] = {}
        # PyTorch keeps meshes in caches until the interpreter ends. Process groups torn down as late as that abort it,
        # beside threads of their own; so they are let go of before (a finalizer also runs at exit).
        weakref.finalize(self, _forget, self._made, self._chosen)

    @classmethod
    def of(cls, mesh: DeviceMesh) -> SharedTransports:
        """Those of a mesh, which carries them."""
        shared: SharedTransports = mesh.__dict__.setdefault("_fsdp_transports", cls())
        return shared

    def resolve(
        self,
        kind: str,
        group: ProcessGroup,
        gather_group: ProcessGroup,
        device: torch.device,
        *,
        sizes_nbytes: Sequence[int] = (),
    ) -> str:
        """As ``resolve_kind``, which is asked once for each pair of groups."""
        key = (group.group_name, gather_group.group_name, device)  # no group: it would live as long as the mesh
        if kind != "auto":
            return resolve_kind(kind, group, gather_group, device)
        if key not in self._chosen:
            self._chosen[key] = resolve_kind(kind, group, gather_group, device, sizes_nbytes=sizes_nbytes)
        return self._chosen[key]

    def get(self, kind: str, group: ProcessGroup, gather_group: ProcessGroup, device: torch.device) -> Transport:
        """As ``make_transport``, which is asked once for each pair of groups and kind where it takes all ranks."""
        key = (self.resolve(kind, group, gather_group, device), group, gather_group, device)
        if key[0] not in _DIRECT_KINDS:
            return make_transport(group, gather_group, device, key[0])
        transport = self._made.get(key)
        if transport is None:
            transport = self._made[key] = make_transport(group, gather_group, device, key[0])
        return transport

    def __reduce__(self) -> tuple[type[SharedTransports], tuple[()]]:
        return SharedTransports, ()  # a mesh that is copied or pickled goes without: transports belong to a process


# DTensors carry their mesh into files of torch.save, and the mesh these, empty.
torch.serialization.add_safe_globals([SharedTransports])

"""The choice of the transport for a process group: the kind that was asked for, or the fastest one for "auto"."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.fsdp.comm.agreement import compare_on_ranks
from megatron.core.distributed.fsdp.comm.auto import cheapest, describe, measure
from megatron.core.distributed.fsdp.comm.registry import TRANSPORT_KINDS, TRANSPORTS, transport_problem
from megatron.core.distributed.fsdp.comm.transport import LocalTransport, Transport


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
    kind: str,
    group: ProcessGroup,
    gather_group: ProcessGroup,
    device: torch.device,
    *,
    sizes_nbytes: Sequence[int] = (),
) -> str:
    """Return the kind, with "auto" replaced by the fastest one, which global rank 0 prints with the reason.

    Args:
        sizes_nbytes: bytes of the buffers to be gathered and reduced, as far as they are known; none: a guess.

    Raises:
        ValueError: an unknown kind, or the backend of ``group`` does not serve the device.

    Ranks: all of ``group``; all get the same answer. Blocks where "auto" measures.
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
    problems = {kind: transport_problem(kind, group, device) for kind in TRANSPORTS}
    kinds = [kind for kind, problem in problems.items() if problem is None]
    why = [f"{kind} cannot serve: {problem}" for kind, problem in problems.items() if problem is not None]
    if len(kinds) == 1:
        chosen = kinds[0]
    elif torch.are_deterministic_algorithms_enabled():
        # Times might choose another one on the next start, whose sums have another order.
        chosen = kinds[-1]
        why.insert(0, "not measured, since deterministic algorithms are asked for")
    else:
        # Training needs both communicators anyway; a first collective makes one, which takes longer than to measure it.
        dist.all_reduce(torch.zeros(1, device=device), group=gather_group)
        makers = {kind: functools.partial(TRANSPORTS[kind].make, group, gather_group, device) for kind in kinds}
        figures, failed, sizes, seconds = measure(makers, group, device, sizes_nbytes)
        chosen = cheapest(figures)
        why = [describe(figures, sizes), f"measured in {seconds:.1f} s", *why]
        why += [f"{kind} failed: {error}" for kind, error in failed.items()]
    if dist.get_rank() == 0:
        print(f"fsdp transport: {chosen} between {group.size()} ranks; {'; '.join(why)}", flush=True)
    return chosen


class SharedTransports:
    """The transports over the process groups of one mesh: units over the mesh share those that all ranks make together.

    They live as long as the mesh, so that whether one is made does not depend on when a rank deletes a model. They hold
    no memory. What "auto" has chosen for a process group stays chosen.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Transport] = {}
        self._resolved: dict[tuple[Any, ...], str] = {}
        # PyTorch caches meshes until the interpreter ends. Process groups torn down that late abort it, since they have
        # threads of their own; a finalizer, which also runs at exit, lets go of them before.
        weakref.finalize(self, self._made.clear)

    @classmethod
    def of(cls, mesh: DeviceMesh) -> SharedTransports:
        """Return those of a mesh, which carries them as an attribute."""
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
        """Call ``resolve_kind`` once for each kind and pair of process groups, and return its answer.

        Raises:
            ValueError: what ``resolve_kind`` raises; ranks that ask for different transports, which would wait for each
                other in different collectives.
        """
        # Names, since process groups as keys would live as long as the mesh.
        key = (kind, group.group_name, gather_group.group_name, device)
        if key not in self._resolved:
            deterministic = torch.are_deterministic_algorithms_enabled()
            settings = {
                "transport": kind,
                "whether there is a process group for all-gathers alone (fsdp_group_ag)": gather_group is not group,
                "torch.use_deterministic_algorithms with transport='auto'": kind == "auto" and deterministic,
            }
            if group.size() > 1:
                compare_on_ranks(settings, [group], device)
            self._resolved[key] = resolve_kind(kind, group, gather_group, device, sizes_nbytes=sizes_nbytes)
        return self._resolved[key]

    def get(self, kind: str, group: ProcessGroup, gather_group: ProcessGroup, device: torch.device) -> Transport:
        """Return the transport of a kind: a shared one where all ranks make it together, else a new one."""
        kind = self.resolve(kind, group, gather_group, device)
        if TRANSPORTS[kind].problem is None:
            return make_transport(group, gather_group, device, kind)
        key = (kind, group, gather_group, device)
        if key not in self._made:
            self._made[key] = make_transport(group, gather_group, device, kind)
        return self._made[key]

    def __reduce__(self) -> tuple[type[SharedTransports], tuple[()]]:
        return SharedTransports, ()  # a copied or pickled mesh has none: transports belong to a process


# DTensors carry their mesh into files of torch.save, and the mesh its transports, without content.
torch.serialization.add_safe_globals([SharedTransports])
